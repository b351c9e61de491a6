"""The linear layer with 6-bit weights."""

from support.helpers import device_fixture
from support.quantized_gemm import TwoLevelGemmTests

device = device_fixture("cpu", "avx512")


class TestInt6Gemm(TwoLevelGemmTests):
    bits = 6
