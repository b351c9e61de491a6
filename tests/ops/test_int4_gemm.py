"""The linear layer with 4-bit weights."""

from support.helpers import device_fixture
from support.quantized_gemm import QuantizedGemmTests, TwoLevelGemmTests

device = device_fixture("cpu", "avx512")


class TestInt4Gemm(QuantizedGemmTests):
    bits = 4


class TestInt4GemmWithTwoLevelScales(TwoLevelGemmTests):
    bits = 4
