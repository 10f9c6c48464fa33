// The line of Python that made a call, and the lock of the interpreter.
#pragma once
#include <Python.h>
#include <torch/csrc/autograd/function.h>

#include <string>

namespace strict {

// Lets Python's other threads run while this one waits.
struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// Whether a line is torch's, Triton's, Python's own, or of this part: of no use to whoever looks for a fault.
inline bool is_inner(const std::string& file) {
  auto has = [&](const char* part) { return file.find(part) != std::string::npos; };
  bool is_pythons = has("/lib/python3") && !has("/site-packages/");
  bool is_librarys = has("/site-packages/torch/") || has("/site-packages/triton/");
  return is_librarys || has("/superstep/strict/") || is_pythons || file.rfind("<", 0) == 0;
}

constexpr int MOST_LINES = 3;

inline std::string line_of(const std::string& file, int line) {
  size_t source = file.rfind("/src/");
  return (source == std::string::npos ? file : file.substr(source + 5)) + ":" + std::to_string(line);
}

inline std::string nameless() {
  auto node = torch::autograd::get_current_node();
  return node ? "autograd's " + node->name() : "no line of Python";
}

// The innermost lines that are neither torch's nor of this part; autograd's thread has none where the operator is its own.
inline std::string caller() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return nameless();
  struct Gil {
    PyGILState_STATE held = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(held); }
  } gil;
  std::string found;
  int lines = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && lines < MOST_LINES) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    if (!name) PyErr_Clear();  // a name that is not of Unicode
    std::string file = name ? name : "?";
    Py_DECREF(code);
    if (!is_inner(file)) {
      found += (lines++ ? " < " : "") + line_of(file, PyFrame_GetLineNumber(frame));
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return lines ? found : nameless();
}

}  // namespace strict
