//! The part of the daemon that does input and output: sockets, processes, files, clocks.
//!
//! It makes no decisions. Decisions are made by the state machine ([`pvmd_machine`]); this part
//! feeds it events and carries out its outputs.
//!
//! - [`cli`], `slave`, `daemon`: how a daemon starts and ends.
//! - `driver`, `input`: its loop and the inputs of the loop.
//! - `place`, `log`, `moves`: runtime directory and lock, log, small files of migrations.
//! - `local`, `local_socket`, `descriptors`, `outbox`: connections of tasks, their sockets, passed
//!   descriptors, send queues.
//! - `tasker`: the tasker process.
//! - `world`: programs and environment of this host.
//! - `pki`, `net`, `session`, `lanes`, `address`, `port`: connections with other daemons.
//! - `bootstrap`, `start`, `join`, `manual`, `ssh`: starting daemons on other hosts.
//! - `images`, `memory`: images and memory of migrating tasks.
//! - `bulk`, `detour`, `stream`, `travel`, `zeros`, `rate`: how images and memory are transferred.
//! - `sets`, `copies`, `states`: stored checkpoints, their copies on other hosts, files of programs
//!   that write their own checkpoints.
//! - `vigil`: spinning for replies of other hosts.
//! - `halts`: failpoints for tests. [`passage`]: what benchmarks measure of `outbox` and `lanes`.

mod address;
mod bootstrap;
mod bulk;
pub mod cli;
mod copies;
mod daemon;
mod descriptors;
mod detour;
mod driver;
mod halts;
mod images;
mod input;
mod join;
mod local;
mod local_socket;
mod log;
mod manual;
mod memory;
mod moves;
mod net;
#[cfg(test)]
mod net_tests;
mod outbox;
pub mod passage;
mod pki;
mod place;
mod port;
mod rate;
mod session;
mod sets;
mod slave;
mod ssh;
mod start;
mod states;
mod stream;
mod sys;
mod tasker;
mod travel;
mod vigil;
mod world;
mod zeros;
