// In front of a file of native/, by `-include`: chosen allocations of this library fail.

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> made{0}, low{0}, high{0};

// From now on the allocations `first` … `first` + `count` − 1 fail.
extern "C" void fail_allocations(long first, long count) { made = 0, low = first, high = first + count; }

static void *allocated(std::size_t size, std::size_t alignment) {
    const long number = made++;
    if (low <= number && number < high) throw std::bad_alloc();
    return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

// hidden, so that no other library has them
#define OWN __attribute__((visibility("hidden")))
OWN void *operator new(std::size_t size) { return allocated(size, 16); }
OWN void *operator new(std::size_t size, std::align_val_t alignment) {
    return allocated(size, std::size_t(alignment));
}
OWN void operator delete(void *given) noexcept { std::free(given); }
OWN void operator delete(void *given, std::size_t) noexcept { std::free(given); }
OWN void operator delete(void *given, std::align_val_t) noexcept { std::free(given); }
OWN void operator delete(void *given, std::size_t, std::align_val_t) noexcept { std::free(given); }
