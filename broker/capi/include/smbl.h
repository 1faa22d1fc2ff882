/* Messages between a foreman and workers that come and go, through the broker of a session.
 *
 * The names follow SMBL and MPI. A member is a program in a session; its number is never used
 * again. Link with -lsempa_broker. All functions may be called from several threads. */
#ifndef SMBL_H
#define SMBL_H

#ifdef __cplusplus
extern "C" {
#endif

/* Roles. A foreman may also end the session. */
#define SMBL_WORKER_ROLE 0
#define SMBL_FOREMAN_ROLE 1

/* Receiver of a message: the foreman, whatever its number. */
#define SMBL_FOREMAN 0

/* Patterns of receive and probe. Any type matches notices and returned messages, too. */
#define SMBL_ANY_SOURCE (-1)
#define SMBL_ANY_TYPE (-1)
/* Types of mail from the broker; the types of a program are 0 or more. */
#define SMBL_TYPE_GONE (-2)     /* a watched member is gone; source is its number */
#define SMBL_TYPE_RETURNED (-3) /* a message came back; source is its receiver */

/* Results of a send. The broker keeps only messages that are taken. */
#define SMBL_SUCCESS 0
#define SMBL_TAKEN 0
#define SMBL_GONE 1       /* the receiver is gone */
#define SMBL_UNKNOWN 2    /* no member has had this number */
#define SMBL_FULL 3       /* a limit of the session is reached; SMBL_Error_string tells which */
#define SMBL_NO_FOREMAN 4 /* the session has no foreman at the moment */
#define SMBL_NOT_ALLOWED 5

/* Errors. */
#define SMBL_ERR_OVER (-1)      /* the session is over: exit with SMBL_EXIT_OVER */
#define SMBL_ERR_GONE (-2)      /* the broker counts this member as gone */
#define SMBL_ERR_REFUSED (-3)   /* the broker does not accept this member */
#define SMBL_ERR_TRUNCATED (-4) /* the buffer is too small; the message is still there */
#define SMBL_ERR_ARG (-5)
#define SMBL_ERR_NOT_INIT (-6) /* no SMBL_Init, or a second one */
#define SMBL_ERR_TIMEOUT (-7)
#define SMBL_ERR_SYSTEM (-8)

/* Reasons why a member is gone. */
#define SMBL_REASON_LEFT 1
#define SMBL_REASON_LOST 2
#define SMBL_REASON_KILLED 3
#define SMBL_REASON_TIMED_OUT 4
#define SMBL_REASON_MOVED_OUT 5
#define SMBL_REASON_SESSION_OVER 6
#define SMBL_REASON_FORGOTTEN 7

/* Flag of SMBL_Send_opt: the message comes back if the receiver is gone without having received
 * the message. */
#define SMBL_RETURN 1

/* Exit status of a program whose session is over. */
#define SMBL_EXIT_OVER 79

typedef struct SMBL_Status {
  int source;      /* number of the sender, of the gone member, or of the receiver of what came back */
  int type;        /* type of the message, SMBL_TYPE_GONE or SMBL_TYPE_RETURNED */
  int size;        /* bytes */
  int reason;      /* SMBL_REASON_... of a notice or a returned message; else 0 */
  int undelivered; /* notice: number of messages that the gone member had not received */
} SMBL_Status;

/* Joins a session. `session` is a session's name (this program is a task of the virtual machine and
 * starts the broker if there is none), or the path of a session file if the text contains '/' (this
 * program is outside). NULL takes SEMPA_SESSION_FILE or SEMPA_SESSION from the environment. */
int SMBL_Init(const char *session, int role);

/* Leaves the session. Mail that was not received is returned or dropped. */
int SMBL_Finalize(void);

/* As SMBL_Finalize, for the owner of the host: others see SMBL_REASON_MOVED_OUT. */
int SMBL_Finalize_for_owner(void);

/* This member's number, 1 or more. */
int SMBL_Comm_rank(int *rank);

/* Number of members that are not gone. Outside the virtual machine only a foreman may ask. */
int SMBL_Comm_size(int *size);

/* Sends a message and waits for the broker's answer: SMBL_TAKEN, SMBL_GONE, SMBL_UNKNOWN, ... */
int SMBL_Send(const void *buffer, int size, int dest, int type);

/* As SMBL_Send, with flags (SMBL_RETURN), and a time in seconds to wait for room or a foreman. */
int SMBL_Send_opt(const void *buffer, int size, int dest, int type, int flags, double seconds);

/* Waits for the earliest message that matches. `status` may be NULL. If the message is larger than
 * `capacity`, the result is SMBL_ERR_TRUNCATED, `status` tells the size, and the message stays. */
int SMBL_Recv(void *buffer, int capacity, int source, int type, SMBL_Status *status);

/* As SMBL_Recv, with a time limit in seconds. */
int SMBL_Recv_timeout(void *buffer, int capacity, int source, int type, double seconds,
                      SMBL_Status *status);

/* Waits for a message that matches and tells about it. The next SMBL_Recv of this thread with the
 * same source and type, or with those of `status`, receives this message. */
int SMBL_Probe(int source, int type, SMBL_Status *status);

/* As SMBL_Probe, without waiting: *flag is 1 if there is such a message. Asks nobody. */
int SMBL_Iprobe(int source, int type, int *flag, SMBL_Status *status);

/* Asks for mail of type SMBL_TYPE_GONE when a member, or any member (SMBL_ANY_SOURCE), is gone. It
 * comes after the last message of that member. */
int SMBL_Watch(int member);

/* *flag is 1 if the session ends. A member may finish its work and leaves. */
int SMBL_Over(int *flag);

/* Ends the session for all after `seconds`. */
int SMBL_Finish(double seconds);

/* The newest result of this thread in words; valid until the thread's next call. */
const char *SMBL_Error_string(void);

#ifdef __cplusplus
}
#endif
#endif
