/* One pass over a batch of samples: round to the stored dtype, check, sum up and checksum each sample while it is in the
 * CPU cache. cache_store/format/sums.py calls it and has the same code in numpy, with the same bits.
 *
 * Every sum is added in float64 in the order that sums.py defines, so that its bits equal those of numpy on every
 * processor. Products of two stored values, or of one and a colour, are exact in float64, so that a compiler that fuses
 * them with the addition changes nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored values are little-endian; other machines use numpy instead"
#endif

#define LANES 8 /* the same as in sums.py */
#define STRIDE 2
#define COLOURS 3

enum { FLOAT16, BFLOAT16, FLOAT32 };

/* One binary for processors with and without wide vectors; the variant is chosen once, when it is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif

typedef struct {
    Py_ssize_t outer, features, inner; /* a sample is [outer, features, inner] */
    Py_ssize_t height, width;          /* of its cells, if it has a preview; inner / (height * width) frames */
    int kind;
} Layout;

static Py_ssize_t values_of(const Layout *layout)
{
    return layout->outer * layout->features * layout->inner;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest, ties to even (IEEE 754): https://gist.github.com/rygorous/2156668, float_to_half_fast3_rtne. */
static inline uint16_t half_of(uint32_t bits)
{
    const uint32_t subnormal_magic = ((127 - 15) + (23 - 10) + 1) << 23;
    uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
    uint32_t subnormal = bits_of(float_of(magnitude) + float_of(subnormal_magic)) - subnormal_magic;
    uint32_t normal = (magnitude + (((uint32_t)(15 - 127) << 23) + 0xfff) + ((magnitude >> 13) & 1)) >> 13;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= ((127u + 16) << 23) ? special : half;
    return (uint16_t)(half | sign >> 16);
}

static inline uint16_t brain_of(uint32_t bits)
{
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded);
}

static inline float value_of_half(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    float value = float_of(magnitude) * 0x1p112f; /* exact; never called for a non-finite value */
    return float_of(bits_of(value) | (uint32_t)(half & 0x8000) << 16);
}

WIDE static void round_all(void *stored, const float *samples, Py_ssize_t count, int kind)
{
    uint16_t *halves = stored;
    if (kind == FLOAT16)
        for (Py_ssize_t at = 0; at < count; at++)
            halves[at] = half_of(bits_of(samples[at]));
    else if (kind == BFLOAT16)
        for (Py_ssize_t at = 0; at < count; at++)
            halves[at] = brain_of(bits_of(samples[at]));
    else
        memcpy(stored, samples, (size_t)count * sizeof *samples);
}

/* Convert values to double; return whether all are finite. A value is not finite if all its exponent bits are set. */
WIDE static int widen_finite(double *values, const void *stored, Py_ssize_t count, int kind)
{
    const uint16_t *halves = stored;
    const uint32_t *words = stored;
    uint32_t exponent = kind == FLOAT16 ? 0x7c00 : kind == BFLOAT16 ? 0x7f80 : 0x7f800000u, largest = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        uint32_t found = (kind == FLOAT32 ? words[at] : halves[at]) & exponent;
        largest = found > largest ? found : largest;
    }
    if (largest == exponent)
        return 0;
    if (kind == FLOAT16)
        for (Py_ssize_t at = 0; at < count; at++)
            values[at] = value_of_half(halves[at]);
    else
        for (Py_ssize_t at = 0; at < count; at++)
            values[at] = float_of(kind == BFLOAT16 ? (uint32_t)halves[at] << 16 : words[at]);
    return 1;
}

/* A feature's lanes: sums of every eighth value and of their squares, and their extrema. */
typedef struct {
    double sums[LANES], squares[LANES], minima[LANES], maxima[LANES];
} Lanes;

static inline void add_to_lanes(Lanes *lanes, const double *values, Py_ssize_t count)
{
    for (Py_ssize_t lane = 0; lane < count; lane++) {
        double value = values[lane];
        lanes->sums[lane] += value;
        lanes->squares[lane] += value * value;
        lanes->minima[lane] = value < lanes->minima[lane] ? value : lanes->minima[lane];
        lanes->maxima[lane] = value > lanes->maxima[lane] ? value : lanes->maxima[lane];
    }
}

static double total_of(const double *lanes)
{
    double fours[4], twos[2];
    for (int lane = 0; lane < 4; lane++)
        fours[lane] = lanes[lane] + lanes[lane + 4];
    for (int lane = 0; lane < 2; lane++)
        twos[lane] = fours[lane] + fours[lane + 2];
    return twos[0] + twos[1];
}

/* Sum up features whose values are consecutive, such as a VAE's channels. */
WIDE static void sum_rows(double *sums, const double *values, const Layout *layout)
{
    Py_ssize_t inner = layout->inner, features = layout->features, whole = inner - inner % LANES;
    for (Py_ssize_t feature = 0; feature < features; feature++) {
        Lanes lanes;
        for (int lane = 0; lane < LANES; lane++) {
            lanes.sums[lane] = lanes.squares[lane] = 0.0;
            lanes.minima[lane] = lanes.maxima[lane] = values[feature * inner];
        }
        for (Py_ssize_t outer = 0; outer < layout->outer; outer++) {
            const double *row = values + (outer * features + feature) * inner;
            for (Py_ssize_t at = 0; at < whole; at += LANES)
                add_to_lanes(&lanes, row + at, LANES);
            add_to_lanes(&lanes, row + whole, inner - whole);
        }
        double minimum = lanes.minima[0], maximum = lanes.maxima[0];
        for (int lane = 1; lane < LANES; lane++) {
            minimum = lanes.minima[lane] < minimum ? lanes.minima[lane] : minimum;
            maximum = lanes.maxima[lane] > maximum ? lanes.maxima[lane] : maximum;
        }
        sums[feature] = total_of(lanes.sums);
        sums[features + feature] = total_of(lanes.squares);
        sums[2 * features + feature] = minimum;
        sums[3 * features + feature] = maximum;
    }
}

/* Sum up features that alternate, such as a tower's: all values of one are added in its first lane. */
WIDE static void sum_columns(double *restrict sums, const double *restrict values, const Layout *layout)
{
    Py_ssize_t features = layout->features;
    double *restrict squares = sums + features, *restrict minima = sums + 2 * features, *restrict maxima = sums + 3 * features;
    for (Py_ssize_t feature = 0; feature < features; feature++) {
        sums[feature] = squares[feature] = 0.0;
        minima[feature] = maxima[feature] = values[feature];
    }
    for (Py_ssize_t outer = 0; outer < layout->outer; outer++, values += features)
        for (Py_ssize_t feature = 0; feature < features; feature++) {
            double value = values[feature];
            sums[feature] += value;
            squares[feature] += value * value;
            minima[feature] = value < minima[feature] ? value : minima[feature];
            maxima[feature] = value > maxima[feature] ? value : maxima[feature];
        }
}

static void add_sample(double *totals, const double *sums, Py_ssize_t features)
{
    for (Py_ssize_t at = 0; at < 2 * features; at++)
        totals[at] += sums[at];
    for (Py_ssize_t at = 2 * features; at < 3 * features; at++)
        totals[at] = (sums[at] < totals[at] ? sums[at] : totals[at]) + 0.0; /* one zero, not two */
    for (Py_ssize_t at = 3 * features; at < 4 * features; at++)
        totals[at] = (sums[at] > totals[at] ? sums[at] : totals[at]) + 0.0;
}

/* Sum the products of [features, 1] with [features, 1, R, G, B] over every second cell of the middle frame, cell by
 * cell; an image is one frame. */
WIDE static void sum_products(double *restrict products, double *restrict cell, const double *values, const float *rgb,
                              const Layout *layout)
{
    Py_ssize_t features = layout->features, cells = layout->height * layout->width, all = features + 1 + COLOURS;
    const double *middle = values + layout->inner / cells / 2 * cells;
    memset(products, 0, (size_t)((features + 1) * all) * sizeof *products);
    for (Py_ssize_t y = 0; y < layout->height; y += STRIDE)
        for (Py_ssize_t x = 0; x < layout->width; x += STRIDE) {
            Py_ssize_t at = y * layout->width + x;
            for (Py_ssize_t feature = 0; feature < features; feature++)
                cell[feature] = middle[feature * layout->inner + at];
            cell[features] = 1.0;
            for (int colour = 0; colour < COLOURS; colour++)
                cell[features + 1 + colour] = rgb[at * COLOURS + colour];
            for (Py_ssize_t row = 0; row <= features; row++) {
                double factor = cell[row];
                double *restrict of_row = products + row * all;
                for (Py_ssize_t column = row / LANES * LANES; column < all; column++)
                    of_row[column] += factor * cell[column];
            }
        }
}

static void add_products(double *gram, double *moment, const double *products, Py_ssize_t features)
{
    Py_ssize_t side = features + 1, all = side + COLOURS;
    for (Py_ssize_t row = 0; row < side; row++) {
        for (Py_ssize_t column = 0; column < side; column++) /* symmetric: not everything below the diagonal is computed */
            gram[row * side + column] += column < row ? products[column * all + row] : products[row * all + column];
        for (int colour = 0; colour < COLOURS; colour++)
            moment[row * COLOURS + colour] += products[row * all + side + colour];
    }
}

/* Castagnoli's polynomial, reflected. */
#define POLYNOMIAL 0x82f63b78u
static uint32_t TABLES[8][256];

static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        TABLES[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++)
            TABLES[table][byte] = TABLES[table - 1][byte] >> 8 ^ TABLES[0][TABLES[table - 1][byte] & 255];
}

static uint32_t crc_by_tables(uint32_t crc, const uint8_t *data, Py_ssize_t bytes)
{
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        word ^= crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++)
            crc ^= TABLES[7 - byte][word >> 8 * byte & 255];
    }
    for (; bytes; bytes--, data++)
        crc = crc >> 8 ^ TABLES[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_INSTRUCTION __builtin_cpu_supports("sse4.2")
__attribute__((target("sse4.2"))) static uint32_t crc_by_instruction(uint32_t crc, const uint8_t *data, Py_ssize_t bytes)
{
    uint64_t word, state = crc;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        memcpy(&word, data, sizeof word);
        state = __builtin_ia32_crc32di(state, word);
    }
    for (; bytes; bytes--, data++)
        state = __builtin_ia32_crc32qi((uint32_t)state, *data);
    return (uint32_t)state;
}
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define HAS_INSTRUCTION 1
static uint32_t crc_by_instruction(uint32_t crc, const uint8_t *data, Py_ssize_t bytes)
{
    uint64_t word;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        memcpy(&word, data, sizeof word);
        crc = __crc32cd(crc, word);
    }
    for (; bytes; bytes--, data++)
        crc = __crc32cb(crc, *data);
    return crc;
}
#else
#define HAS_INSTRUCTION 0
#define crc_by_instruction crc_by_tables
#endif

static uint32_t crc32c(const void *data, Py_ssize_t bytes)
{
    return ~(HAS_INSTRUCTION ? crc_by_instruction(~0u, data, bytes) : crc_by_tables(~0u, data, bytes));
}

typedef struct {
    Layout layout;
    Py_ssize_t number, sample_bytes;
    const float *samples;
    uint8_t *stored, *kept;
    double *totals;
    const float *rgb;
    double *gram, *moment;
    uint32_t *checksums;
} Batch;

/* `scratch` holds a sample's values, its sums, a cell and its products. */
static void pass_over(const Batch *batch, double *scratch)
{
    const Layout *layout = &batch->layout;
    Py_ssize_t count = values_of(layout), features = layout->features, cells = layout->height * layout->width;
    double *values = scratch, *sums = values + count, *cell = sums + 4 * features, *products = cell + features + 1 + COLOURS;
    for (Py_ssize_t sample = 0; sample < batch->number; sample++) {
        uint8_t *stored = batch->stored + sample * batch->sample_bytes;
        if (!batch->kept[sample])
            continue;
        if (batch->samples)
            round_all(stored, batch->samples + sample * count, count, layout->kind);
        if (!widen_finite(values, stored, count, layout->kind)) {
            batch->kept[sample] = 0;
            continue;
        }
        (layout->inner == 1 ? sum_columns : sum_rows)(sums, values, layout);
        add_sample(batch->totals, sums, features);
        if (batch->rgb) {
            sum_products(products, cell, values, batch->rgb + sample * cells * COLOURS, layout);
            add_products(batch->gram, batch->moment, products, features);
        }
        if (batch->checksums)
            batch->checksums[sample] = crc32c(stored, batch->sample_bytes);
    }
}

static int is_fit(const Batch *batch, const Py_buffer *lent)
{
    const Layout *layout = &batch->layout;
    Py_ssize_t features = layout->features, count, cells;
    if (layout->kind < FLOAT16 || layout->kind > FLOAT32 || layout->outer < 1 || features < 1 || layout->inner < 1)
        return 0;
    count = values_of(layout), cells = layout->height * layout->width;
    return lent[0].len == batch->number * batch->sample_bytes
        && (!batch->samples || lent[1].len == batch->number * count * (Py_ssize_t)sizeof(float))
        && lent[3].len == 4 * features * (Py_ssize_t)sizeof(double)
        && (!batch->rgb || (layout->outer == 1 && cells > 0 && layout->inner % cells == 0
                            && lent[4].len == batch->number * cells * COLOURS * (Py_ssize_t)sizeof(float)
                            && lent[5].len == (features + 1) * (features + 1) * (Py_ssize_t)sizeof(double)
                            && lent[6].len == (features + 1) * COLOURS * (Py_ssize_t)sizeof(double)))
        && (!batch->checksums || lent[7].len == batch->number * (Py_ssize_t)sizeof(uint32_t));
}

static PyObject *pass_over_lent(Batch *batch, const Py_buffer *lent)
{
    Layout *layout = &batch->layout;
    batch->number = lent[2].len;
    batch->sample_bytes = values_of(layout) * (layout->kind == FLOAT32 ? 4 : 2);
    batch->stored = lent[0].buf, batch->samples = lent[1].buf, batch->kept = lent[2].buf, batch->totals = lent[3].buf;
    batch->rgb = lent[4].buf, batch->gram = lent[5].buf, batch->moment = lent[6].buf, batch->checksums = lent[7].buf;
    if (!is_fit(batch, lent)) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a batch differ in the samples that they are of");
        return NULL;
    }
    size_t side = (size_t)layout->features + 1;
    double *scratch = PyMem_Malloc(
        ((size_t)values_of(layout) + 4 * side + (side + COLOURS) * (batch->rgb ? side + 1 : 1)) * sizeof *scratch);
    if (!scratch)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    pass_over(batch, scratch);
    Py_END_ALLOW_THREADS
    PyMem_Free(scratch);
    Py_RETURN_NONE;
}

#define LENT 8

static PyObject *add_batch(PyObject *module, PyObject *arguments)
{
    (void)module;
    Batch batch = {{0, 0, 0, 0, 0, 0}, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    Layout *layout = &batch.layout;
    Py_buffer lent[LENT];
    memset(lent, 0, sizeof lent);
    PyObject *done = NULL;
    if (PyArg_ParseTuple(arguments, "i(nnn)(nn)w*z*w*w*z*z*z*z*", &layout->kind, &layout->outer, &layout->features,
                         &layout->inner, &layout->height, &layout->width, &lent[0], &lent[1], &lent[2], &lent[3],
                         &lent[4], &lent[5], &lent[6], &lent[7]))
        done = pass_over_lent(&batch, lent);
    for (int each = 0; each < LENT; each++)
        if (lent[each].obj)
            PyBuffer_Release(&lent[each]);
    return done;
}

static PyMethodDef METHODS[] = {
    {"add_batch", add_batch, METH_VARARGS,
     "add_batch(kind, layout, cells, stored, samples, kept, totals, rgb, gram, moment, checksums)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_sums", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sums(void)
{
    fill_tables();
    return PyModuleDef_Init(&MODULE);
}
