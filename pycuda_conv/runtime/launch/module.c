// module.c: the module, whose functions stand in the other parts.
#include "launch.h"

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launch", "Launches of whole schedules, and calls that were made before.", 0, NULL};
PyMODINIT_FUNC PyInit__launch(void) {
  PyMethodDef* const parts[] = {schedule_methods, context_methods, key_methods, ready_methods, call_methods};
  PyObject* made = can_take_turns() ? PyModule_Create(&module) : NULL;
  for (size_t i = 0; made && i < sizeof parts / sizeof *parts; i++)
    if (PyModule_AddFunctions(made, parts[i])) Py_CLEAR(made);
  return made;
}
