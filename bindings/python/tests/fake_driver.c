/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver that writes down its calls, for the tests of stream order: there is no GPU. */
#include <stdint.h>
#include <stdio.h>

static int told(int result) {
  fflush(stdout);
  return result;
}

int cuEventCreate(uintptr_t *event, unsigned flags) {
  *event = 5;
  printf("create %u\n", flags);
  return told(0);
}

int cuEventRecord(uintptr_t event, uintptr_t stream) {
  printf("record %d on %d\n", (int)event, (int)stream);
  return told(stream == 13 ? 400 : 0); /* a stream that does not exist */
}

int cuStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned flags) {
  printf("wait of %d for %d, flags %u\n", (int)stream, (int)event, flags);
  return told(0);
}

int cuEventDestroy_v2(uintptr_t event) {
  printf("destroy %d\n", (int)event);
  return told(0);
}
