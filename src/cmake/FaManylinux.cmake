# SPDX-License-Identifier: Apache-2.0
# FA_MANYLINUX=2_28 links a library that runs with glibc 2.28 and newer and the libstdc++ of its time, whatever this machine has. The linker
# sees stand-ins of the system's libraries (manylinux_stubs.py says how). What libstdc++.so lacked then comes from libstdc++.a, hidden by the
# version script. Other targets of the build link the machine's libraries as always.
set(FA_MANYLINUX "" CACHE STRING "Link the library for this manylinux policy, for wheels: 2_28 or empty")

function(fa_link_for_manylinux target)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "FA_MANYLINUX=${FA_MANYLINUX}: manylinux is about Linux, and this build is for ${CMAKE_SYSTEM_NAME}")
  endif()
  find_package(Python3 3.8 REQUIRED COMPONENTS Interpreter)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/manylinux_${FA_MANYLINUX}")
  set(script "${PROJECT_SOURCE_DIR}/src/cmake/manylinux_stubs.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${script}")
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${script}" "${CMAKE_CXX_COMPILER}" "${FA_MANYLINUX}" "${folder}"
    RESULT_VARIABLE result ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "FA_MANYLINUX=${FA_MANYLINUX}: ${error}")
  endif()
  # Before glibc 2.34 threads and dlopen were libraries of their own, which must be named there.
  set(separate -lpthread)
  if(FA_CUDA)
    list(APPEND separate -ldl -lrt)
  endif()
  target_link_options(${target} PRIVATE "-L${folder}")
  target_link_libraries(
    ${target} PRIVATE "${folder}/stat.o" -Wl,--no-as-needed ${separate} -Wl,--as-needed -lstdc++ -l:libstdc++.a -l:libc_nonshared.a -lgcc -lld)
endfunction()
