"""Names of the dtypes that users can choose."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8", "int4")
