//! The part of the daemon that touches the world: sockets, processes, files, clocks. It decides nothing: every decision
//! is the [`pvmd_machine`]'s, which this part feeds with events and whose outputs it carries out.
//!
//! * [`cli`], `slave`, `daemon`: how a daemon starts and ends. `driver`: its loop.
//! * `place`: its directory and lock. `log`: its log. `moves`: small files of moves.
//! * `local`: tasks. `local_socket`: their sockets. `descriptors`: what their frames bring along. `tasker`: the tasker's
//!   process.
//! * `world`: programs and environment.
//! * `pki`, `net`, `session`, `lanes`, `address`: other daemons. `bootstrap`, `start`, `join`, `manual`: starting them. `images`, `memory`: what moves;
//!   `bulk`, `detour`, `stream`, `travel`, `zeros`: how.
//!   `vigil`: waiting awake for their answers.
//! * `halts`: where tests have it stand still. [`passage`]: what benchmarks measure of `outbox` and `lanes`.

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
