# SPDX-License-Identifier: Apache-2.0
# cmake -DPORT_DIR=... -DWORK_DIR=... -DGENERATOR=... -P: runs a port's portfile.cmake with plain CMake in place of the functions of vcpkg that it
# calls. Compiled without optimisation, because what is tested is the port.
cmake_minimum_required(VERSION 3.22)
set(PORT flashattn)
set(FEATURES core)
set(CURRENT_PACKAGES_DIR "${WORK_DIR}/packages")

function(vcpkg_check_linkage)
endfunction()

function(vcpkg_download_distfile variable)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "URLS;FILENAME;SHA512" "")
  file(DOWNLOAD "${arg_URLS}" "${WORK_DIR}/${arg_FILENAME}" EXPECTED_HASH SHA512=${arg_SHA512})
  set(${variable} "${WORK_DIR}/${arg_FILENAME}" PARENT_SCOPE)
endfunction()

function(vcpkg_extract_source_archive variable)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "ARCHIVE" "")
  file(ARCHIVE_EXTRACT INPUT "${arg_ARCHIVE}" DESTINATION "${WORK_DIR}/source")
  file(GLOB folder "${WORK_DIR}/source/*") # the archive's only folder
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${arg_SOURCE_PATH}" -B "${WORK_DIR}/tree" "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}"
            -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_TYPE=Debug ${arg_OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${WORK_DIR}/tree" --parallel 2 --target install COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The real one moves the folder to share/ and corrects the paths in it.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "CONFIG_PATH" "")
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}/flashattn-config.cmake")
    message(FATAL_ERROR "no CMake package in ${arg_CONFIG_PATH}")
  endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/lib/pkgconfig/flashattn.pc")
    message(FATAL_ERROR "no flashattn.pc")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  file(INSTALL ${arg_FILE_LIST} DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
endfunction()

file(READ "${PORT_DIR}/vcpkg.json" manifest)
string(JSON name GET "${manifest}" name) # an error where the file is no JSON
if(NOT name STREQUAL PORT)
  message(FATAL_ERROR "vcpkg.json is about ${name}")
endif()
include("${PORT_DIR}/portfile.cmake")
foreach(file usage LICENSE)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/share/${PORT}/${file}")
    message(FATAL_ERROR "the port did not install share/${PORT}/${file}")
  endif()
endforeach()
