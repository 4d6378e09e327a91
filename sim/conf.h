#ifndef MGPU_SIM_CONF_H
#define MGPU_SIM_CONF_H

#include "state.h"

/* $MGPU_SIM_DIR or its default. */
const char *sim_dir(void);
/* 0, or a negative errno: -EINVAL for a line that means nothing. */
int sim_read_conf(struct sim_conf *conf);

#endif
