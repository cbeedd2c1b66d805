// The collectives of shared_memory_group.py, step by step the same, in the same memory: of the ranks
// that meet, some may run this and others the Python.
//
// Memory order.  A rank writes its slot and its purpose, then adds one to its number (release).  A
// rank that reads that number (acquire) therefore sees what was written before.  It writes to a slot
// again only after all have come to the next meeting, and so have read what it wrote for this one;
// that is why there are two sets of slots.  Nothing else is shared.  A number that is waited for is
// the word of a futex: the kernel compares it once more before it puts a rank to sleep, so no wake-up
// is lost.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

namespace {

using Number = int64_t;
using Reduce = void (*)(char* out, const char* first, Number stride, Number rows, Number bytes);

enum Answer : Number { DONE, LATE, ODD };
enum Kind : Number { REDUCE, SCATTER, GATHER, MOVE, EXCHANGE };

constexpr Number LINE = 8;       // numbers of a rank
constexpr int YIELDS = 50;       // how often a rank yields the core before it sleeps
constexpr Number BLOCK = 4096;   // bytes that are reduced over all ranks, before the next ones

// Compiled twice, which takes time: for vectors that not all such processors have, too.
#if defined(__x86_64__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

}  // namespace

// One rank's part; kernel.py has the same fields.
struct Meeting {
  Number* numbers;
  char* slots[2];
  Number* bounds[2];
  Number slot_bytes, place, size, sleep_ns;
  Number purpose, occasion, history;
  Number met;        // how often this rank has met the others
  Number awaited;    // the first rank that is not known to have come; -1: this rank does not wait
  Number has_slept;  // since it waits for that one
  Number odd;        // the first rank that came for something else, or -1
};

// One collective; kernel.py has the same fields.
struct Task {
  Number kind;
  const char* x;       // null: this rank gives nothing
  char* out;
  Number bytes;        // of x; of one rank's part of it (SCATTER)
  Number item;         // bytes of an element
  Number whole_bytes;  // up to so many, every rank reduces the whole piece
  Number source;       // the rank whose x is taken (MOVE), or -1
  Reduce reduce;
  const Number* given;  // where the part for each rank begins in x, and where the last one ends
  const Number* taken;  // the same of out
  Number begin, phase, longest;
  Number wrong;  // a rank that gives another number of bytes than is taken here, or -1
};

namespace {

Number* line(const Meeting* m, Number place) { return m->numbers + LINE * place; }

char* slot(const Meeting* m, Number meeting, Number place) {
  return m->slots[meeting & 1] + place * m->slot_bytes;
}

Number* bounds(const Meeting* m, Number meeting, Number place) {
  return m->bounds[meeting & 1] + place * (m->size + 1);
}

void futex(Number* word, int operation, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, word, operation, value, limit, nullptr, 0);  // the low half: little-endian
}

bool has_come(Meeting* m, Number* theirs) {
  const auto seen = [&] { return __atomic_load_n(theirs, __ATOMIC_ACQUIRE); };
  if (seen() >= m->met) return true;
  for (int k = 0; k < YIELDS && !m->has_slept; ++k) {
    sched_yield();
    if (seen() >= m->met) return true;
  }
  const Number before = seen();
  if (before < m->met && !__atomic_load_n(line(m, m->size), __ATOMIC_ACQUIRE)) {  // not aborted
    const timespec limit{m->sleep_ns / 1000000000, m->sleep_ns % 1000000000};
    m->has_slept = 1;
    futex(theirs, FUTEX_WAIT, static_cast<uint32_t>(before), &limit);
  }
  return seen() >= m->met;
}

Number length(const Meeting* m, const Task* t) {
  Number most = m->slot_bytes;
  if (t->kind == SCATTER) most = most / m->size / t->item * t->item;
  return std::max<Number>(0, std::min(most, t->bytes - t->begin));
}

// Copy a piece of x to this rank's slot of the next meeting.
void give(const Meeting* m, const Task* t) {
  char* mine = slot(m, m->met + 1, m->place);
  const Number n = length(m, t);
  if (t->kind == EXCHANGE)
    std::memcpy(bounds(m, m->met + 1, m->place), t->given, (m->size + 1) * sizeof(Number));
  if (!t->x || !n) return;
  if (t->kind == SCATTER)
    for (Number k = 0; k < m->size; ++k)
      std::memcpy(mine + k * n, t->x + k * t->bytes + t->begin, n);
  else
    std::memcpy(mine, t->x + t->begin, n);
}

void copy(char* to, const char* from, Number bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Every rank reduces a share of a piece, for all to take at the next meeting: elements in each.
Number share_of(const Meeting* m, const Task* t) {
  const Number count = length(m, t) / t->item;
  return (count + m->size - 1) / m->size * t->item;
}

void reduce_share(const Meeting* m, const Task* t) {
  const Number n = length(m, t), share = share_of(m, t);
  const Number first = std::min(m->place * share, n), last = std::min(first + share, n);
  t->reduce(slot(m, m->met + 1, m->place), slot(m, m->met, 0) + first, m->slot_bytes, m->size,
            last - first);
}

void take_shares(const Meeting* m, const Task* t) {
  const Number n = length(m, t), share = share_of(m, t);
  for (Number k = 0; k < m->size; ++k)
    copy(t->out + t->begin + k * share, slot(m, m->met, k), std::min(share, n - k * share));
}

// Take the parts for this rank that lie in the current pieces; false if one has a wrong length.
bool exchange(const Meeting* m, Task* t) {
  t->longest = 0;
  for (Number k = 0; k < m->size; ++k) {
    const Number* theirs = bounds(m, m->met, k);
    const Number first = theirs[m->place], last = theirs[m->place + 1];
    if (last - first != t->taken[k + 1] - t->taken[k]) {
      t->wrong = k;
      return false;
    }
    const Number low = std::max(first, t->begin), high = std::min(last, t->begin + m->slot_bytes);
    copy(t->out + t->taken[k] + low - first, slot(m, m->met, k) + low - t->begin, high - low);
    t->longest = std::max(t->longest, theirs[m->size]);
  }
  return true;
}

template <typename T, typename Combine>
__attribute__((always_inline)) inline void reduce(char* out, const char* first, Number stride,
                                                  Number rows, Number bytes, Combine combine) {
  T sums[BLOCK / sizeof(T)];
  for (Number begin = 0; begin < bytes; begin += BLOCK) {
    const Number count = std::min(BLOCK, bytes - begin) / static_cast<Number>(sizeof(T));
    const auto row = [&](Number k) {
      return reinterpret_cast<const T*>(first + k * stride + begin);
    };
    const T *a = row(0), *b = row(1);
    for (Number i = 0; i < count; ++i) sums[i] = combine(a[i], b[i]);
    for (Number k = 2; k < rows; ++k) {
      const T* next = row(k);
      for (Number i = 0; i < count; ++i) sums[i] = combine(sums[i], next[i]);
    }
    std::memcpy(out + begin, sums, count * sizeof(T));
  }
}

}  // namespace

// In the order of the ranks, so that all get the same bits.  Sums of integers wrap: they are added
// without a sign.
#define REDUCTION(target, name, T, combined)                                            \
  extern "C" target void name(char* out, const char* first, Number stride, Number rows, \
                              Number bytes) {                                           \
    reduce<T>(out, first, stride, rows, bytes, [](T a, T b) -> T { return combined; }); \
  }
#define EXTREMES(kind, T)                     \
  REDUCTION(, max_##kind, T, a > b ? a : b)   \
  REDUCTION(, min_##kind, T, a < b ? a : b)

REDUCTION(WIDE, sum_float32, float, a + b)
REDUCTION(WIDE, sum_float64, double, a + b)
REDUCTION(, sum_int8, uint8_t, a + b)
REDUCTION(, sum_uint8, uint8_t, a + b)
REDUCTION(, sum_int32, uint32_t, a + b)
REDUCTION(, sum_int64, uint64_t, a + b)
EXTREMES(int8, int8_t)
EXTREMES(uint8, uint8_t)
EXTREMES(int32, int32_t)
EXTREMES(int64, int64_t)

// Meet the others, or go on waiting for them: LATE after some time, or a signal, then call it again.
extern "C" Number meet(Meeting* m, Number patient) {
  const Number met = m->awaited < 0 ? m->met + 1 : m->met, beside = 1 + 3 * (met & 1);
  Number* said = line(m, m->place) + beside;
  if (m->awaited < 0) {
    m->met = met;
    m->odd = -1;
    m->has_slept = m->awaited = 0;
    std::memcpy(said, &m->purpose, 3 * sizeof(Number));
    __atomic_store_n(line(m, m->place), met, __ATOMIC_RELEASE);
    futex(line(m, m->place), FUTEX_WAKE, INT_MAX, nullptr);
  }
  for (; m->awaited < m->size; ++m->awaited, m->has_slept = 0) {
    Number* theirs = line(m, m->awaited);
    if (!has_come(m, theirs)) return LATE;
    if (std::memcmp(said, theirs + beside, 3 * sizeof(Number)) == 0) continue;
    if (m->odd < 0) m->odd = m->awaited;
    if (!patient) break;
  }
  m->awaited = -1;
  return m->odd < 0 ? DONE : ODD;
}

// Run a collective, or go on with it after LATE.
extern "C" Number run(Meeting* m, Task* t) {
  enum { GIVE, TAKE, TAKE_SHARES };
  for (;;) {
    if (t->phase == GIVE) {
      give(m, t);
      t->phase = TAKE;
    }
    if (const Number answer = meet(m, 0)) return answer;
    const Number n = length(m, t);
    char* out = t->out + t->begin;
    const char* slots = slot(m, m->met, 0);
    if (t->phase == TAKE_SHARES) {
      take_shares(m, t);
    } else if (t->kind == REDUCE && n > t->whole_bytes) {
      reduce_share(m, t);
      t->phase = TAKE_SHARES;
      continue;
    } else if (t->kind == REDUCE) {
      t->reduce(out, slots, m->slot_bytes, m->size, n);
    } else if (t->kind == SCATTER) {
      t->reduce(out, slots + m->place * n, m->slot_bytes, m->size, n);
    } else if (t->kind == GATHER) {
      for (Number k = 0; k < m->size; ++k) copy(out + k * t->bytes, slot(m, m->met, k), n);
    } else if (t->kind == MOVE) {
      if (t->source >= 0) copy(out, slot(m, m->met, t->source), n);
    } else if (!exchange(m, t)) {
      return DONE;  // in vain
    }
    t->phase = GIVE;
    const Number whole = t->kind == EXCHANGE ? t->longest : t->bytes;
    t->begin += t->kind == SCATTER ? std::max<Number>(n, 1) : m->slot_bytes;
    if (t->begin >= whole) return DONE;
  }
}
