//! Measures the cost of a load report for its sender: sends messages to the resource manager, each
//! after a pause, and times the calls. Prints the nanoseconds of all calls, sorted, in one line.
//! The resource manager discards the messages, because it does not know their context.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use libpvm::{Body, Vm};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::GuestAccess;
use sempa_proto::{HostId, Micros, frame};
use std::time::{Duration, Instant};

/// Number of messages sent.
const SENDS: usize = 500;
/// The pause before each send: load watchers do not send reports in a burst.
const PAUSE: Duration = Duration::from_millis(5);
/// A context and a tag that no task receives.
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
        owner_reason: "no user is logged in".into(),
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
