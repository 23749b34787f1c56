# SPDX-License-Identifier: Apache-2.0
# The C examples shown in READMEs must be minimal.c, which another test compiles and runs.
file(READ "${ROOT}/bindings/c/minimal.c" example)
string(REGEX REPLACE "^/\\*[^\n]*\n/\\*[^\n]*\n" "" example "${example}") # without its head comments
foreach(name IN ITEMS README.md bindings/c/README.md)
  if(NOT EXISTS "${ROOT}/${name}")
    continue()
  endif()
  file(READ "${ROOT}/${name}" readme)
  string(FIND "${readme}" "```c\n${example}```" place)
  if(place EQUAL -1)
    message(SEND_ERROR "${name} does not quote bindings/c/minimal.c as it is")
  endif()
endforeach()
