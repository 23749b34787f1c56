// SPDX-License-Identifier: Apache-2.0
// What FA_TEST_REFERENCE names: computes expectations for a test program that runs under an emulator.
#include "reference/elsewhere.h"

int main() { return reference::serve(stdin, stdout) ? 0 : 1; }
