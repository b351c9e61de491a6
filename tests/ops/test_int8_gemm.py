"""The linear layer with 8-bit weights."""

from support.helpers import device_fixture
from support.quantized_gemm import QuantizedGemmTests

device = device_fixture("cpu", "avx512")


class TestInt8Gemm(QuantizedGemmTests):
    bits = 8
