# SPDX-License-Identifier: Apache-2.0
# The README shows causal.cpp, which another test runs, as it is.
file(READ "${SOURCE}/causal.cpp" example)
file(READ "${SOURCE}/README.md" readme)
string(REGEX REPLACE "^//[^\n]*\n//[^\n]*\n" "" example "${example}") # without its head comments
string(FIND "${readme}" "```cpp\n${example}```" place)
if(place EQUAL -1)
  message(FATAL_ERROR "README.md does not quote causal.cpp as it is")
endif()
