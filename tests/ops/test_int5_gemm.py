"""The linear layer with 5-bit weights."""

from support.helpers import device_fixture
from support.quantized_gemm import QuantizedGemmTests, TwoLevelGemmTests

device = device_fixture("cpu", "avx512")


class TestInt5Gemm(QuantizedGemmTests):
    bits = 5


class TestInt5GemmWithTwoLevelScales(TwoLevelGemmTests):
    bits = 5
