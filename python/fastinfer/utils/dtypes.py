"""Names of dtypes that users choose from."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8", "int4")
