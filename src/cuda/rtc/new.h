// SPDX-License-Identifier: Apache-2.0
// Stands in for <new> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
