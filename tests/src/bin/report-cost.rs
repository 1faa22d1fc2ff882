//! What it costs a task to send a load report, as a load watcher does: so many sends to the resource manager, each after a pause,
//! timed from the call to its return. Prints the nanoseconds of each, sorted, in one line. The resource manager throws them away:
//! they come in a context that it does not know.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use libpvm::{Body, Vm};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::GuestAccess;
use sempa_proto::{HostId, Micros, frame};
use std::time::{Duration, Instant};

/// Sends.
const SENDS: usize = 500;
/// Pause between two: nobody sends reports one after the other.
const PAUSE: Duration = Duration::from_millis(5);
/// A context and a tag that nobody receives.
const NOBODYS: i32 = 0x5e4d;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::enroll()?;
    let rm = vm.runtime().rm().ok_or("there is no resource manager")?.tid;
    let report = LoadReport {
        host: HostId::MASTER,
        at: Micros(1),
        sample: LoadSample {
            cores: 2,
            busy: 0.5,
            available_bytes: 1 << 33,
            ..LoadSample::default()
        },
        owner_verdict: OwnerVerdict::Absent { since: None },
        confidence: 90,
        owner_reason: "nobody is logged in".into(),
        logins: Vec::new(),
        access: GuestAccess::Welcome,
        access_reason: String::new(),
        limits: GuestLimits::default(),
    };
    let bytes = frame::to_bytes(&report)?;
    let mut took = Vec::with_capacity(SENDS);
    for _ in 0..SENDS {
        std::thread::sleep(PAUSE);
        let body = Body {
            enc: DSIG_X86_64,
            bytes: bytes.clone().into(),
        };
        let begin = Instant::now();
        vm.send_in(rm, NOBODYS, NOBODYS, body)?;
        took.push(begin.elapsed().as_nanos());
    }
    took.sort_unstable();
    let all: Vec<String> = took.iter().map(u128::to_string).collect();
    println!("{}", all.join(" "));
    Ok(vm.exit()?)
}
