/* Copy the pixels of Pillow's images and compute the means of their cells; precompute/images/pixels.py has both in
 * Python too.
 *
 * Pillow stores RGB as four bytes per pixel, of which the last is unused, and lends them by Arrow's C data interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pixels are packed as little-endian numbers; other machines do without this"
#endif

#define BANDS 3
#define LENT_BYTES 4
#define FIRST_BANDS 0x000000ffffff /* mask for two packed pixels, read as one number */
#define SECOND_BANDS 0xffffff000000
#define MAX_CELL 256 /* pixels per side: sums of columns fit in 16 bits, sums of cells in 32 */

/* https://arrow.apache.org/docs/format/CDataInterface.html */
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

static int is_lent_rgb(const struct ArrowArray *lent, const Py_buffer *out)
{
    return lent->n_children == 1 && lent->offset == 0 && lent->children[0]->offset == 0
        && lent->children[0]->length == lent->length * LENT_BYTES && lent->length * BANDS == out->len;
}

static void copy_all(char *to, const char *from, Py_ssize_t pixels)
{
    for (; pixels > 2; pixels -= 2, to += 2 * BANDS, from += 2 * LENT_BYTES) {
        uint64_t two;
        memcpy(&two, from, sizeof two);
        two = (two & FIRST_BANDS) | (two >> 8 & SECOND_BANDS);
        memcpy(to, &two, sizeof two); /* the next pixel overwrites the last two bytes */
    }
    for (; pixels; pixels--, to += BANDS, from += LENT_BYTES)
        memcpy(to, from, BANDS);
}

static PyObject *copy_pixels(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *capsule;
    Py_buffer out;
    if (!PyArg_ParseTuple(arguments, "Ow*", &capsule, &out))
        return NULL;
    const struct ArrowArray *lent = PyCapsule_GetPointer(capsule, "arrow_array");
    int fits = lent && is_lent_rgb(lent, &out);
    if (fits)
        copy_all(out.buf, lent->children[0]->buffers[1], out.len / BANDS);
    else if (lent)
        PyErr_SetString(PyExc_ValueError, "out must hold three bytes for each pixel of an image of three or four bands");
    PyBuffer_Release(&out);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* Compute the means of a row of cells, rounded as in Pillow's `reduce`; `sums` are sums of the image's columns. */
static void mean_row(uint8_t *means, const uint8_t *pixels, uint16_t *sums, Py_ssize_t width, Py_ssize_t cell_height,
                     Py_ssize_t cell_width)
{
    memset(sums, 0, (size_t)(width * BANDS) * sizeof *sums);
    for (Py_ssize_t y = 0; y < cell_height; y++, pixels += width * BANDS)
        for (Py_ssize_t at = 0; at < width * BANDS; at++)
            sums[at] += pixels[at];
    uint32_t area = (uint32_t)(cell_height * cell_width), one_over_area = (1u << 24) / area;
    for (Py_ssize_t cell = 0; cell < width / cell_width; cell++, means += BANDS) {
        uint32_t totals[BANDS] = {0};
        for (Py_ssize_t x = 0; x < cell_width; x++, sums += BANDS)
            for (int band = 0; band < BANDS; band++)
                totals[band] += sums[band];
        for (int band = 0; band < BANDS; band++)
            means[band] = (uint8_t)((totals[band] + area / 2) * one_over_area >> 24);
    }
}

static int are_bands(const Py_buffer *array)
{
    return array->ndim == 3 && array->itemsize == 1 && array->shape[2] == BANDS && array->len > 0;
}

static int is_cut_evenly(Py_ssize_t pixels, Py_ssize_t cells)
{
    return pixels % cells == 0 && pixels / cells <= MAX_CELL;
}

static PyObject *mean_all(const Py_buffer *pixels, const Py_buffer *means)
{
    if (!are_bands(pixels) || !are_bands(means) || !is_cut_evenly(pixels->shape[0], means->shape[0])
        || !is_cut_evenly(pixels->shape[1], means->shape[1])) {
        PyErr_SetString(PyExc_ValueError, "pixels [Y, X, 3] must be cut evenly into cells [h, w, 3], of up to 256 a side");
        return NULL;
    }
    Py_ssize_t rows = means->shape[0], width = pixels->shape[1];
    uint16_t *sums = PyMem_Malloc((size_t)(width * BANDS) * sizeof *sums);
    if (!sums)
        return PyErr_NoMemory();
    for (Py_ssize_t row = 0; row < rows; row++)
        mean_row((uint8_t *)means->buf + row * (means->len / rows),
                 (const uint8_t *)pixels->buf + row * (pixels->len / rows), sums, width, pixels->shape[0] / rows,
                 width / means->shape[1]);
    PyMem_Free(sums);
    Py_RETURN_NONE;
}

static PyObject *mean_pixels(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *pixels_object, *means_object, *done = NULL;
    Py_buffer pixels, means;
    if (!PyArg_ParseTuple(arguments, "OO", &pixels_object, &means_object)
        || PyObject_GetBuffer(pixels_object, &pixels, PyBUF_C_CONTIGUOUS))
        return NULL;
    if (!PyObject_GetBuffer(means_object, &means, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)) {
        done = mean_all(&pixels, &means);
        PyBuffer_Release(&means);
    }
    PyBuffer_Release(&pixels);
    return done;
}

static PyMethodDef METHODS[] = {
    {"copy_pixels", copy_pixels, METH_VARARGS, "copy_pixels(arrow_array, out)"},
    {"mean_pixels", mean_pixels, METH_VARARGS, "mean_pixels(pixels, means)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_pixels", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pixels(void)
{
    return PyModuleDef_Init(&MODULE);
}
