# libcuda.so.1, the simulated CUDA driver. Included by the Makefile of this folder.
# Compiled against NVIDIA's own headers, taken from PyPI at build time and never kept here.
CUDA_DEV     := nvidia-cuda-runtime==13.5.37
CUDA_INCLUDE := $(OUT)/include/cuda
CUDA_OBJ_DIR := $(OUT)/obj/cuda
CUDA_LIB     := $(OUT)/libcuda.so.1
CUDA_SOURCES := cuda_device.c cuda_procs.c cuda_handles.c cuda_context.c cuda_addresses.c cuda_memory.c \
                cuda_pointer.c cuda_ipc.c cuda_pool.c cuda_vmm.c cuda_array.c cuda_copy.c cuda_module.c \
                cuda_stream.c cuda_event.c cuda_launch.c
CUDA_OBJECTS := $(CUDA_SOURCES:%.c=$(CUDA_OBJ_DIR)/%.o) $(CUDA_OBJ_DIR)/cuda_exports.o
CUDA_CFLAGS  := $(CFLAGS) -isystem $(CUDA_INCLUDE) -I$(CUDA_OBJ_DIR) -I.

$(CUDA_INCLUDE)/cuda.h:
	mkdir -p $(CUDA_INCLUDE)
	$(PIP) download --quiet --no-deps --dest $(CUDA_INCLUDE) $(CUDA_DEV)
	cd $(CUDA_INCLUDE) && python3 -m zipfile -e nvidia_cuda_runtime-*.whl wheel
	find $(CUDA_INCLUDE)/wheel \( -name cuda.h -o -name cudaTypedefs.h \) -exec cp {} $(CUDA_INCLUDE) \;
	rm -rf $(CUDA_INCLUDE)/wheel $(CUDA_INCLUDE)/*.whl
	touch $@

$(CUDA_OBJ_DIR)/cuda.i: $(CUDA_INCLUDE)/cuda.h
	@mkdir -p $(@D)
	$(CC) -E -P -D__CUDA_API_VERSION_INTERNAL $< > $@

$(CUDA_OBJ_DIR)/cuda_impl.h: cuda_exports.py $(CUDA_OBJ_DIR)/cuda.i
	python3 cuda_exports.py header $(CUDA_OBJ_DIR)/cuda.i > $@

$(CUDA_OBJ_DIR)/cuda_exports.c: cuda_exports.py $(CUDA_OBJ_DIR)/cuda.i
	python3 cuda_exports.py source $(CUDA_OBJ_DIR)/cuda.i $(CUDA_INCLUDE)/cudaTypedefs.h > $@

$(CUDA_OBJ_DIR)/cuda_exports.o: $(CUDA_OBJ_DIR)/cuda_exports.c cuda_sim.h state.h $(CUDA_OBJ_DIR)/cuda_impl.h
	$(CC) $(CUDA_CFLAGS) -c -o $@ $<

$(CUDA_OBJ_DIR)/%.o: %.c cuda_sim.h state.h $(CUDA_OBJ_DIR)/cuda_impl.h
	$(CC) $(CUDA_CFLAGS) -c -o $@ $<

$(CUDA_LIB): $(CUDA_OBJECTS) $(STATE_OBJECTS) cuda.map
	$(CC) -shared -Wl,-soname,libcuda.so.1 -Wl,--version-script=cuda.map -Wl,-z,defs -Wl,-Bsymbolic -o $@.new \
	    $(CUDA_OBJECTS) $(STATE_OBJECTS) -pthread
	mv $@.new $@
