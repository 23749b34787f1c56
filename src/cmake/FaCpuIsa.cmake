# SPDX-License-Identifier: Apache-2.0
# The CPU kernels are one set of sources compiled once per instruction set. The dispatcher chooses one at run time. The file
# name decides the flags of a source: *_avx512.cpp is compiled for `avx512`; every file that is named after none of these must run on any
# processor of the target.
set(FA_ALL_CPU_ISAS avx2 avx512 avx512_bf16 amx neon neon_fhm neon_bf16 sve256)

# The stack is aligned to 16 bytes on Windows, and GCC does not align variables in vector registers' size there (its bug 54412). The assembler
# writes every vector move in the form that needs no alignment.
set(FA_STACK_FLAGS)
if(WIN32)
  set(FA_STACK_FLAGS -Wa,-muse-unaligned-vector-move)
endif()
set(FA_AVX2_FLAGS -mavx2 -mfma -mf16c ${FA_STACK_FLAGS})
set(FA_AVX512_FLAGS ${FA_STACK_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(FA_AVX512_BF16_FLAGS ${FA_AVX512_FLAGS} -mavx512bf16)
# The tile instructions are written as assembly; only the conversion of P needs a flag of its own.
set(FA_AMX_FLAGS ${FA_AVX512_BF16_FLAGS})
# Every 64-bit Arm processor has NEON. GCC would load the rows of a product (cpu/gemm.h) long before they are needed, and spill sums.
set(FA_NEON_FLAGS)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(FA_NEON_FLAGS -fno-schedule-insns)
endif()
set(FA_NEON_FHM_FLAGS -march=armv8.2-a+fp16fml ${FA_NEON_FLAGS})
set(FA_NEON_BF16_FLAGS -march=armv8.2-a+bf16)
set(FA_SVE256_FLAGS -march=armv8.2-a+sve -msve-vector-bits=256 ${FA_NEON_FLAGS})

# Older compilers and assemblers lack some of these; the library is then built without them.
include(CheckCXXSourceCompiles)
function(fa_check_isa isa source)
  string(TOUPPER ${isa} upper)
  list(JOIN FA_${upper}_FLAGS " " CMAKE_REQUIRED_FLAGS)
  check_cxx_source_compiles("${source}" FA_COMPILER_HAS_${upper})
  if(FA_COMPILER_HAS_${upper})
    set(FA_CPU_ISAS "${FA_CPU_ISAS} ${isa}" PARENT_SCOPE)
  endif()
endfunction()

set(FA_CPU_ISAS "portable")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(FA_CPU_ISAS "portable avx2 avx512")
  fa_check_isa(avx512_bf16
    "#include <immintrin.h>
    int main() { return static_cast<int>(_mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_setzero_ps(), __m512bh{}, __m512bh{}))); }")
  if(FA_COMPILER_HAS_AVX512_BF16)
    fa_check_isa(amx "int main() { asm volatile(\"tdpbf16ps %tmm0, %tmm1, %tmm2\"); }")
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(FA_CPU_ISAS "portable neon")
  fa_check_isa(neon_bf16
    "#include <arm_neon.h>
    int main() {
      const bfloat16x8_t x = vcvtq_low_bf16_f32(vdupq_n_f32(1.0f));
      return static_cast<int>(vgetq_lane_f32(vbfmmlaq_f32(vdupq_n_f32(0.0f), x, x), 0));
    }")
  fa_check_isa(neon_fhm
    "#include <arm_neon.h>
    int main() {
      const float16x8_t x = vreinterpretq_f16_u32(vdupq_n_u32(0));
      return static_cast<int>(vgetq_lane_f32(vfmlalq_low_f16(vdupq_n_f32(0.0f), x, x), 0));
    }")
  fa_check_isa(sve256
    "#include <arm_sve.h>
    typedef svfloat32_t F __attribute__((arm_sve_vector_bits(256)));
    struct Member { F x; };
    int main() {
      const Member m = {svdup_n_f32(0.0f)};
      return static_cast<int>(svmaxnmv_f32(svptrue_b32(), m.x));
    }")
endif()
string(REPLACE " " ";" FA_CPU_ISA_LIST "${FA_CPU_ISAS}")

# Drops the sources that this processor family or compiler cannot compile from the list named `list_variable`.
function(fa_filter_isa_sources list_variable)
  foreach(isa IN LISTS FA_ALL_CPU_ISAS)
    if(NOT isa IN_LIST FA_CPU_ISA_LIST)
      list(FILTER ${list_variable} EXCLUDE REGEX "_${isa}\\.cpp$")
    endif()
  endforeach()
  set(${list_variable} ${${list_variable}} PARENT_SCOPE)
endfunction()

# Gives the kernel sources among the arguments the flags of the instruction set that they are named after (in the caller's directory). Compilers
# may not fuse a product and a sum that the kernels keep apart: they would do so in one place and not in another, and bits would depend on
# which of two ways the row takes.
function(fa_set_isa_flags)
  set(portable_sources ${ARGN})
  list(FILTER portable_sources INCLUDE REGEX "_portable\\.cpp$")
  if(portable_sources)
    set_source_files_properties(${portable_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
  endif()
  foreach(isa IN LISTS FA_ALL_CPU_ISAS)
    string(TOUPPER ${isa} upper)
    set(sources ${ARGN})
    list(FILTER sources INCLUDE REGEX "_${isa}\\.cpp$")
    if(sources)
      set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;${FA_${upper}_FLAGS}")
    endif()
  endforeach()
endfunction()
