# SPDX-License-Identifier: Apache-2.0
# keep_ptxas_log.sh <compiler> ... -o <object> ...: runs the compiler and keeps what it prints in <object>.ptxas. What is more than the
# report of `ptxas -v` is printed too.
object=
previous=
for argument in "$@"; do
  if [ "$previous" = -o ]; then object=$argument; fi
  previous=$argument
done
if [ -z "$object" ]; then exec "$@"; fi
"$@" 2>"$object.ptxas"
result=$?
grep -a -v -e '^ptxas info *: [^(]' -e '^    [0-9]* bytes stack frame' "$object.ptxas" >&2
exit $result
