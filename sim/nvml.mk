# libnvidia-ml.so.1, the simulated NVML. Included by the Makefile of this folder.
# Compiled against NVIDIA's own header, taken from PyPI at build time and never kept here.
NVML_DEV     := nvidia-nvml-dev==13.5.37
NVML_INCLUDE := $(OUT)/include/nvml
NVML_OBJ_DIR := $(OUT)/obj/nvml
NVML_LIB     := $(OUT)/libnvidia-ml.so.1
NVML_SOURCES := nvml.c nvml_identity.c nvml_figures.c nvml_processes.c nvml_events.c nvml_state.c
NVML_OBJECTS := $(NVML_SOURCES:%.c=$(NVML_OBJ_DIR)/%.o)
NVML_STUBS   := $(NVML_OBJ_DIR)/nvml_stubs
NVML_CFLAGS  := $(CFLAGS) -isystem $(NVML_INCLUDE) -I.

$(NVML_INCLUDE)/nvml.h:
	mkdir -p $(NVML_INCLUDE)
	$(PIP) download --quiet --no-deps --dest $(NVML_INCLUDE) $(NVML_DEV)
	cd $(NVML_INCLUDE) && python3 -m zipfile -e nvidia_nvml_dev-*.whl wheel
	find $(NVML_INCLUDE)/wheel -name nvml.h -exec cp {} $@ \;
	rm -rf $(NVML_INCLUDE)/wheel $(NVML_INCLUDE)/*.whl

$(NVML_OBJ_DIR)/%.o: %.c nvml_sim.h state.h $(NVML_INCLUDE)/nvml.h
	@mkdir -p $(@D)
	$(CC) $(NVML_CFLAGS) -c -o $@ $<

$(NVML_STUBS).c: nvml_stubs.py $(NVML_INCLUDE)/nvml.h
	@mkdir -p $(@D)
	$(CC) -E -P -DNVML_NO_UNVERSIONED_FUNC_DEFS $(NVML_INCLUDE)/nvml.h | python3 nvml_stubs.py > $@

# The stubs take the arguments of what they stand for and use none.
$(NVML_STUBS).o: $(NVML_STUBS).c nvml_sim.h
	$(CC) $(NVML_CFLAGS) -Wno-unused-parameter -c -o $@ $<

$(NVML_LIB): $(NVML_OBJECTS) $(NVML_STUBS).o $(STATE_OBJECTS) nvml.map
	$(CC) -shared -Wl,-soname,libnvidia-ml.so.1 -Wl,--version-script=nvml.map -Wl,-z,defs -Wl,-Bsymbolic -o $@.new \
	    $(NVML_OBJECTS) $(NVML_STUBS).o $(STATE_OBJECTS) -pthread
	mv $@.new $@
