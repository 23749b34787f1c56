# SPDX-License-Identifier: Apache-2.0
# The CPU kernels are one set of sources compiled once per instruction set. The dispatcher chooses one at run time. The file
# name decides the flags of a source: *_avx2.cpp, *_avx512.cpp; every other file must run on any processor of the target.

set(FA_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(FA_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(FA_CPU_ISAS "portable avx2 avx512")
else()
  set(FA_CPU_ISAS "portable")
endif()

# Drops the sources that this processor family cannot compile from the list named `list_variable`.
function(fa_filter_isa_sources list_variable)
  if(NOT FA_CPU_ISAS MATCHES avx)
    list(FILTER ${list_variable} EXCLUDE REGEX "_avx(2|512)\\.cpp$")
    set(${list_variable} ${${list_variable}} PARENT_SCOPE)
  endif()
endfunction()

# Gives the sources among the arguments that are named after an instruction set its flags (in the caller's directory).
function(fa_set_isa_flags)
  foreach(source IN LISTS ARGN)
    if(source MATCHES "_avx2\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AVX2_FLAGS}")
    elseif(source MATCHES "_avx512\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${FA_AVX512_FLAGS}")
    endif()
  endforeach()
endfunction()
