"""The server as an application of Ray Serve: ``serve run fastinfer.ray_serve.app:app model=NAME``.

The gateway takes HTTP requests. It is the router of ``fastinfer router`` with one replica behind it: a deployment of
Ray, whose replicas are engines that Ray starts, watches and scales.
"""
