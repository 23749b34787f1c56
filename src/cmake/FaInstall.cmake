# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: components `runtime` (the library), `development` (headers, CMake package, pkg-config) and `tools` (the command-line
# tool, see bindings/cli). The installed tree can be moved as a whole: no file in it contains an absolute path.
include(CMakePackageConfigHelpers)

set(FA_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/flashattn")

install(
  TARGETS flashattn
  EXPORT flashattn-targets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development
  # On Windows: the DLL and the file that programs are linked with.
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT runtime
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
install(
  FILES include/flashattn/flashattn.h include/flashattn/flashattn_dist.h include/flashattn/flashattn_dl.h include/flashattn/flashattn.hpp
        "${CMAKE_CURRENT_BINARY_DIR}/include/flashattn/version.h"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/flashattn"
  COMPONENT development)
install(
  EXPORT flashattn-targets
  NAMESPACE flashattn::
  DESTINATION "${FA_CMAKE_DIR}"
  COMPONENT development)

configure_package_config_file(
  src/cmake/flashattn-config.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config.cmake" INSTALL_DESTINATION "${FA_CMAKE_DIR}"
  NO_SET_AND_CHECK_MACRO)
# The SONAME has the major version, and changes with every break of the ABI.
write_basic_package_version_file(
  "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config-version.cmake" COMPATIBILITY SameMajorVersion)
install(
  FILES "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config.cmake" "${CMAKE_CURRENT_BINARY_DIR}/flashattn-config-version.cmake"
  DESTINATION "${FA_CMAKE_DIR}"
  COMPONENT development)

# The .pc file derives the prefix from its own location. Absolute install directories (some distributions) are kept as they are.
file(RELATIVE_PATH FA_PC_PREFIX "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" FA_PC_PREFIX "${FA_PC_PREFIX}")
foreach(dir LIBDIR INCLUDEDIR)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${dir}}")
    set(FA_PC_${dir} "${CMAKE_INSTALL_${dir}}")
  else()
    set(FA_PC_${dir} "\${prefix}/${CMAKE_INSTALL_${dir}}")
  endif()
endforeach()
configure_file(src/cmake/flashattn.pc.in flashattn.pc @ONLY)
install(
  FILES "${CMAKE_CURRENT_BINARY_DIR}/flashattn.pc"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig"
  COMPONENT development)
