# SPDX-License-Identifier: Apache-2.0
# The body of the example that `go test` runs must stand in the README as it is.
file(READ "${SOURCE}/example_test.go" example)
file(READ "${SOURCE}/README.md" readme)
string(REGEX REPLACE ".*func Example\\(\\) {\n(.*)\t// Output.*" "\\1" body "${example}")
string(REPLACE "\n\t" "\n" body "\n${body}")
string(FIND "${readme}" "```go${body}```" place)
if(place EQUAL -1)
  message(FATAL_ERROR "README.md does not quote Example of example_test.go as it is:\n${body}")
endif()
