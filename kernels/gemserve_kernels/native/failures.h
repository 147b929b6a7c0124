// What is thrown ends in Python as an exception, and not the process. An entry returns null, or what
// went wrong; `native_library.py` raises that.

#pragma once

#include <cstdio>
#include <exception>
#include <new>

// What the exception that is being handled says: `catch (...) { return reason(); }`.
static const char *reason() noexcept {
    static thread_local char text[256];
    try {
        throw;
    } catch (const std::bad_alloc &) {
        return "out of memory";  // Python knows these words
    } catch (const std::exception &error) {
        std::snprintf(text, sizeof text, "%s", error.what());
        return text;
    } catch (...) {
        return "an unknown exception";
    }
}

// An exception of a team of threads. None may leave a parallel region or one of its loops, so
// what a thread needs is made before them, and they are skipped if that has failed.
class Team {
  public:
    // Whether `make` has thrown in no thread. All threads of the team call this, which is a barrier.
    template <typename Make> bool can(const Make &make) {
        try {
            make();
        } catch (...) {
#pragma omp critical
            thrown = std::current_exception();
        }
#pragma omp barrier
        return !thrown;
    }

    void rethrow() const {
        if (thrown) std::rethrow_exception(thrown);
    }

  private:
    std::exception_ptr thrown;
};
