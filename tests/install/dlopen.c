/* SPDX-License-Identifier: Apache-2.0 */
/* A user's program that finds the library at run time, by its SONAME. */
#include <flashattn/flashattn_dl.h>

int main(void) {
  fa_dl_api fa;
  fa_context ctx;
  char error[256];
  if (fa_dl_open(NULL, &fa, error, sizeof error) != 0) {
    puts(error);
    return 1;
  }
  printf("dlopen: flashattn %s\n", fa.fa_version_string());
  if (fa.fa_create(&ctx, NULL) != FA_OK) return 2;
  fa.fa_destroy(ctx);
  fa_dl_close(&fa);
  return 0;
}
