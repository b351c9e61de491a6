"""The linear layer with 4-bit weights."""

from helpers import device_fixture
from quantized_gemm import QuantizedGemmTests

device = device_fixture("cpu", "avx512")


class TestInt4Gemm(QuantizedGemmTests):
    bits = 4
