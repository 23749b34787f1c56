# SPDX-License-Identifier: Apache-2.0
# Toolchain file: builds for 64-bit Windows with Debian's cross compiler (g++-mingw-w64-x86-64-posix: the one whose libstdc++ has threads) and
# runs programs under wine where it is installed. cmake -DCMAKE_TOOLCHAIN_FILE=src/cmake/x86_64-w64-mingw32.cmake ...
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# Programs bring the compiler's run time along, as the library does.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
find_program(FA_WINE NAMES wine64 wine PATHS /usr/lib/wine)
if(FA_WINE)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${FA_WINE}")
endif()
