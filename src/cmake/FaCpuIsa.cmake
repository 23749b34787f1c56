# SPDX-License-Identifier: Apache-2.0
# The CPU kernels are one set of sources compiled once per instruction set. The dispatcher chooses one at run time. The file
# name decides the flags of a source: *_avx2.cpp, *_avx512.cpp, *_avx512_bf16.cpp, *_amx.cpp; every other file must run on any processor of the target.

set(FA_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(FA_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)

set(FA_AVX512_BF16_FLAGS ${FA_AVX512_FLAGS} -mavx512bf16)

# The tile instructions are written as assembly; only the conversion of P needs a flag of its own.
set(FA_AMX_FLAGS ${FA_AVX512_BF16_FLAGS})

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(FA_CPU_ISAS "portable avx2 avx512")
  include(CheckCXXSourceCompiles)
  # Older compilers and assemblers lack these two; the library is then built without them.
  set(CMAKE_REQUIRED_FLAGS "-mavx512f -mavx512bf16")
  check_cxx_source_compiles(
    "#include <immintrin.h>
    int main() { return static_cast<int>(_mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_setzero_ps(), __m512bh{}, __m512bh{}))); }"
    FA_COMPILER_HAS_AVX512_BF16)
  if(FA_COMPILER_HAS_AVX512_BF16)
    string(APPEND FA_CPU_ISAS " avx512_bf16")
    check_cxx_source_compiles("int main() { asm volatile(\"tdpbf16ps %tmm0, %tmm1, %tmm2\"); }" FA_COMPILER_HAS_AMX)
    if(FA_COMPILER_HAS_AMX)
      string(APPEND FA_CPU_ISAS " amx")
    endif()
  endif()
  unset(CMAKE_REQUIRED_FLAGS)
else()
  set(FA_CPU_ISAS "portable")
endif()

# Drops the sources that this processor family cannot compile from the list named `list_variable`.
function(fa_filter_isa_sources list_variable)
  if(NOT FA_CPU_ISAS MATCHES avx)
    list(FILTER ${list_variable} EXCLUDE REGEX "_avx(2|512)\\.cpp$")
  endif()
  if(NOT FA_CPU_ISAS MATCHES avx512_bf16)
    list(FILTER ${list_variable} EXCLUDE REGEX "_avx512_bf16\\.cpp$")
  endif()
  if(NOT FA_CPU_ISAS MATCHES amx)
    list(FILTER ${list_variable} EXCLUDE REGEX "_amx\\.cpp$")
  endif()
  set(${list_variable} ${${list_variable}} PARENT_SCOPE)
endfunction()

# Gives the sources among the arguments that are named after an instruction set its flags (in the caller's directory).
function(fa_set_isa_flags)
  foreach(source IN LISTS ARGN)
    if(source MATCHES "_avx2\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AVX2_FLAGS}")
    elseif(source MATCHES "_avx512\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AVX512_FLAGS}")
    elseif(source MATCHES "_avx512_bf16\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AVX512_BF16_FLAGS}")
    elseif(source MATCHES "_amx\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AMX_FLAGS}")
    endif()
  endforeach()
endfunction()
