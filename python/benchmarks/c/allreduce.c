/* Seconds that MPI_Allreduce takes, called from C: what every layer above is measured against.
 *
 *     mpirun -n 2 ./allreduce BYTES REPEATS
 *
 * Sums floats in place. Rank 0 prints one line a call: the slower rank's seconds. Payloads are
 * verified; the first three calls, which set up connections and fault in pages, are not printed. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARM_UP = 3 };

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3) {
        fprintf(stderr, "usage: allreduce BYTES REPEATS\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const size_t count = strtoull(argv[1], NULL, 10) / sizeof(float);
    const int repeats = atoi(argv[2]);
    float *buffer = malloc(count * sizeof(float));
    if (buffer == NULL) {
        fprintf(stderr, "no memory for %zu floats\n", count);
        MPI_Abort(MPI_COMM_WORLD, 3);
    }
    for (int call = 0; call < repeats + WARM_UP; call++) {
        for (size_t i = 0; i < count; i++) buffer[i] = 1.0f;
        MPI_Barrier(MPI_COMM_WORLD);
        const double started = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double seconds = MPI_Wtime() - started;
        for (size_t i = 0; i < count; i++) {
            if (buffer[i] != (float)size) {
                fprintf(stderr, "rank %d: element %zu is %f, not %d\n", rank, i, buffer[i], size);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
        }
        MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (rank == 0 && call >= WARM_UP) printf("%.9f\n", seconds);
    }
    free(buffer);
    MPI_Finalize();
    return 0;
}
