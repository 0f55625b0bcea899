# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# The filter of Doxyfile, which leaves out the namespaces `detail`. Members that public classes inherit from a class of
# such a namespace are part of the interface: for Doxygen, these base classes are in a namespace inherited_detail.
BEGIN {
  base = "(counted_module|dense_gates|device_memory_source|dlib_layer|layer_of_parts|lstm_core|slot|smooth_activation|" \
         "low_rank_(attention|conv|embedding|gates|linear|lstm|module))[ <]"
}
/^namespace (.*::)?detail \{/ { detail = inherited = $0; sub(/detail \{/, "inherited_detail {", inherited) }
/^(\/\/\/|template|requires)/ && !inside { held = held $0 "\n"; next }
detail && $0 ~ "^class " base {
  printf "} %s ", inherited
  inside = 1
}
/^};/ && inside { $0 = $0 " } " detail; inside = 0 }
/^}  \/\/ namespace (.*::)?detail/ { detail = "" }
{
  if (sub(/stored_layer<detail::/, "")) sub(/, T, Device>/, "<T>")
  gsub("detail::" base, "inherited_&")
  printf "%s%s\n", held, $0
  held = ""
}
