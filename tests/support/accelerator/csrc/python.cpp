// What the runtime asks of the interpreter: the line of the program that called, and not to hold its lock while waiting.
#include <Python.h>
#include <frameobject.h>

#include <string>

#include "runtime.h"

namespace simulated {

namespace {

bool interpreter_runs() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// Frames inside torch say less than the first one outside.
bool is_library(const std::string& file) { return file.find("site-packages") != std::string::npos || file[0] == '<'; }

}  // namespace

std::string python_line(bool only_if_held) {
  // A thread that never ran Python (autograd's, in a backward without hooks) has no line.
  if (!interpreter_runs() || PyGILState_GetThisThreadState() == nullptr) return "";
  if (only_if_held && !PyGILState_Check()) return "";
  PyGILState_STATE gil = PyGILState_Ensure();
  std::string line;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int depth = 0; frame != nullptr && depth < 40; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    std::string name = file ? file : "<unknown>";
    Py_DECREF(code);
    if (!is_library(name)) {
      line = name.substr(name.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      break;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return line;
}

WithoutGil::WithoutGil() : state_(nullptr) {
  if (interpreter_runs() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace simulated
