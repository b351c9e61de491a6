"""The linear layer with 4-bit weights."""

from support.helpers import device_fixture
from support.quantized_gemm import QuantizedGemmTests

device = device_fixture("cpu", "avx512")


class TestInt4Gemm(QuantizedGemmTests):
    bits = 4
