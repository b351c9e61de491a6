# isa_flags_NAME: the compiler's flags for the CPU kernels of each instruction set.
set(isa_flags_portable "")
set(isa_flags_avx2 -mavx2 -mfma -mf16c)
set(isa_flags_avx512_vnni ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
  -mprefer-vector-width=512
  -Wno-maybe-uninitialized -Wno-uninitialized)  # GCC 12 warns of its own AVX-512 headers
# FASTINFER_BF16_PROMPTS: attention has a kernel for rows of prompts, in bf16, and another one for all others. Not what
# the compiler says of the instructions that it may use: those of kernels for other CPUs could include these.
set(isa_flags_avx512_bf16 ${isa_flags_avx512_vnni} -mavx512bf16 -DFASTINFER_BF16_PROMPTS)
# The tile instructions are inline assembly and need no flag.
set(isa_flags_amx ${isa_flags_avx512_bf16} -DFASTINFER_TILES)
set(isa_flags_amx_emulated ${isa_flags_avx2} -DFASTINFER_BF16_PROMPTS -DFASTINFER_TILES -DFASTINFER_EMULATED_TILES)
