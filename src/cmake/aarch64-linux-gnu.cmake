# SPDX-License-Identifier: Apache-2.0
# Toolchain file: builds for 64-bit Arm Linux with Debian's cross compiler (g++-aarch64-linux-gnu) and runs tests under qemu-user where it is
# installed. cmake -DCMAKE_TOOLCHAIN_FILE=src/cmake/aarch64-linux-gnu.cmake ...
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
find_program(FA_QEMU_AARCH64 qemu-aarch64)
if(FA_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${FA_QEMU_AARCH64};-L;/usr/aarch64-linux-gnu;-cpu;max")
endif()
