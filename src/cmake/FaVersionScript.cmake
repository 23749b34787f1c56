# SPDX-License-Identifier: Apache-2.0
# The exported symbols are exactly the lines of one text file; the linker's version script is made from it.

function(fa_add_version_script target symbols_file)
  file(STRINGS "${symbols_file}" symbols REGEX "^fa_")
  list(JOIN symbols ";\n    " global)
  set(map "${CMAKE_CURRENT_BINARY_DIR}/${target}.map")
  file(CONFIGURE OUTPUT "${map}" CONTENT "{\n  global:\n    ${global};\n  local:\n    *;\n};\n" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${symbols_file}")
  target_link_options(${target} PRIVATE "-Wl,--version-script=${map}")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${map}")
endfunction()
