# SPDX-License-Identifier: Apache-2.0
# Copies the sources of the adapters, and of the crates that they need, to the folder TO.
file(REMOVE_RECURSE "${TO}")
foreach(folder IN ITEMS flashattn-sys flashattn adapters)
  file(
    COPY "${CMAKE_CURRENT_LIST_DIR}/../${folder}"
    DESTINATION "${TO}"
    PATTERN target EXCLUDE
    PATTERN Cargo.lock EXCLUDE)
endforeach()
