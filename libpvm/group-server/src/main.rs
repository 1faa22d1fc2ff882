//! `pvmgs`: the group server for programs that contain PVM's own group library. Their library
//! spawns it.

use libpvm::{Error, Match, Vm};
use pvmgs::dump;
use pvmgs::server::{Action, Server, TAG_MEMBER_ENDED};
use sempa_proto::PvmError;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::CTX_GROUPS;
use sempa_proto::task::{NotifyRequest, NotifySubjects};
use std::process::ExitCode;

/// Name in the mailbox under which libraries find the server.
const MAILBOX_NAME: &str = "pvmgs";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--version") => {
            println!("pvmgs {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(option) => {
            println!(
                "Usage: pvmgs [--version]\nServes groups to programs that contain PVM's own group library, \
                 which start it."
            );
            return ExitCode::from(u8::from(option != "--help"));
        }
    }
    let vm = match Vm::enroll() {
        Ok(vm) => vm,
        Err(error) => {
            eprintln!("pvmgs: {error}");
            return ExitCode::FAILURE;
        }
    };
    match serve(&vm) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvmgs: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Registers the server and answers requests until one of them ends it.
///
/// # Errors
/// Another server runs, or the virtual machine has ended.
fn serve(vm: &Vm) -> Result<(), Error> {
    let mut registration = Packer::new(Encoding::Xdr);
    registration.pack_int(vm.tid().raw());
    vm.mailbox_put(MAILBOX_NAME, 0, registration)
        .map_err(|error| {
            let reason = format!("is another group server running? {error}");
            Error::new(PvmError::Already, reason)
        })?;
    let mut server = Server::default();
    loop {
        let message = vm.recv(Match::any().ctx(CTX_GROUPS))?;
        // A message in another encoding has no effect, as one that cannot be decoded.
        let Ok(mut body) = Vm::unpack(&message) else {
            continue;
        };
        for action in server.handle(message.src, message.tag, &mut body) {
            match action {
                // A receiver that has ended needs no reply.
                Action::Reply { to, tag, body } => {
                    let _ = vm.send_in_context(to, CTX_GROUPS, tag, body);
                }
                Action::WatchTask(tid) => vm.notify(NotifyRequest {
                    subjects: NotifySubjects::TaskExit(vec![tid]),
                    ctx: CTX_GROUPS,
                    tag: TAG_MEMBER_ENDED,
                    is_cancellation: false,
                })?,
                Action::Dump => eprint!("{}", dump::text("DUMP", vm.tid(), &server.groups())),
                Action::End => {
                    eprint!("{}", dump::text("pvmgs", vm.tid(), &server.groups()));
                    return vm.exit();
                }
            }
        }
    }
}
