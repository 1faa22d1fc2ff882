/* The link of a master or a slave of fastDNAml, on which trees travel as text. */
#ifndef COMM_LINK_H
#define COMM_LINK_H

typedef struct {
  int done_flag; /* 1: there are no more trees */
} comm_block;

void open_link(comm_block *comm);
void close_link(comm_block *comm);
void read_comm_msg(comm_block *comm, char *tree);
void write_comm_msg(comm_block *comm, char *tree);

#endif
