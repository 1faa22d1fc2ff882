//! The part of the daemon that performs input and output: sockets, processes, files, clocks.
//!
//! The shell makes no decisions. The state machine ([`pvmd_machine`]) makes the decisions; the
//! shell passes events to the state machine and executes its outputs.
//!
//! - [`cli`], `slave`, `daemon`: start and end of a daemon.
//! - `driver`, `input`, `session_input`: the daemon's loop and the inputs of the loop.
//! - `env`, `limits`: environment variables and limits that several modules use.
//! - `runtime_dir`, `log`, `migration_files`: runtime directory and lock, log, small files of
//!   migrations.
//! - `task_listener`, `local_socket`, `descriptors`, `outbox`: connections of tasks, their sockets,
//!   passed descriptors, send queues.
//! - `tasker`: the tasker process.
//! - `host_env`: programs and environment of this host.
//! - `pki`, `net`, `handshakes`, `session`, `address`, `udp_port`: connections with other daemons.
//! - `bootstrap`, `host_start`, `sealed_bootstrap`, `manual_start`, `ssh`: starting daemons on
//!   other hosts.
//! - `images`, `memory_transfer`: images and memory of migrating tasks.
//! - `bulk_tcp`, `bulk_fallback`, `blocking_stream`, `image_transfer`, `zeros`, `rate_limit`:
//!   connections and formats for the transfer of images and memory.
//! - `checkpoints`, `checkpoint_copies`, `program_state`: stored checkpoints, their copies on other
//!   hosts, files of programs that write their own checkpoints.
//! - `vm_note`, `vm_query`: the note about the virtual machine for the case that the master is
//!   lost; whether an earlier virtual machine still runs.
//! - `reply_spin`: spinning for replies of other hosts.
//! - `failpoints`: failpoints for tests.
//! - [`bench_hooks`]: functions by which benchmarks measure `outbox` and pair streams.

mod address;
pub mod bench_hooks;
mod blocking_stream;
mod bootstrap;
mod bulk_fallback;
mod bulk_tcp;
mod checkpoint_copies;
mod checkpoints;
pub mod cli;
mod daemon;
mod descriptors;
mod driver;
mod env;
mod failpoints;
mod foreign_library;
mod handshakes;
mod host_env;
mod host_start;
mod image_transfer;
mod images;
mod input;
mod limits;
mod local_socket;
mod log;
mod manual_start;
mod memory_transfer;
mod migration_files;
mod net;
#[cfg(test)]
mod net_tests;
mod outbox;
mod pki;
mod program_state;
mod rate_limit;
mod reply_spin;
mod runtime_dir;
mod sealed_bootstrap;
mod session;
mod session_input;
mod slave;
mod ssh;
mod sys;
mod task_listener;
mod tasker;
mod tasker_handle;
mod transfer_counters;
mod udp_port;
mod vm_note;
mod vm_query;
mod zeros;
