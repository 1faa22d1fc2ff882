//! Measures the time that a load report takes its sender. Sends [`MESSAGE_COUNT`] messages to the
//! resource manager with pauses between them. Prints the durations of the calls in nanoseconds,
//! sorted, in one line. The resource manager discards the messages, because their context is
//! unknown to it.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use libpvm::{Body, Vm};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::GuestAccess;
use sempa_proto::{HostId, Micros, frame};
use std::time::{Duration, Instant};

/// Number of messages that the program sends.
const MESSAGE_COUNT: usize = 500;
/// Pause before each message, because load watchers do not send reports in a burst.
const SEND_INTERVAL: Duration = Duration::from_millis(5);
/// Context and tag of the messages. No task receives messages with them.
const UNUSED_CONTEXT_AND_TAG: i32 = 0x5e4d;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::enroll()?;
    let rm_tid = vm.runtime().rm().ok_or("there is no resource manager")?.tid;
    let report = LoadReport {
        host: HostId::MASTER,
        at: Micros(1),
        sample: LoadSample {
            cores: 2,
            busy_share: 0.5,
            available_bytes: 1 << 33,
            ..LoadSample::default()
        },
        owner_verdict: OwnerVerdict::Absent { since: None },
        confidence_percent: 90,
        owner_reason: "no user is logged in".into(),
        logins: Vec::new(),
        guest_access: GuestAccess::Welcome,
        access_reason: String::new(),
        guest_limits: GuestLimits::default(),
    };
    let bytes = frame::to_bytes(&report)?;
    let mut durations_ns = Vec::with_capacity(MESSAGE_COUNT);
    for _ in 0..MESSAGE_COUNT {
        std::thread::sleep(SEND_INTERVAL);
        let body = Body {
            enc: DSIG_X86_64,
            bytes: bytes.clone().into(),
        };
        let started_at = Instant::now();
        vm.send_in_context(rm_tid, UNUSED_CONTEXT_AND_TAG, UNUSED_CONTEXT_AND_TAG, body)?;
        durations_ns.push(started_at.elapsed().as_nanos());
    }
    durations_ns.sort_unstable();
    let duration_texts: Vec<String> = durations_ns.iter().map(u128::to_string).collect();
    println!("{}", duration_texts.join(" "));
    Ok(vm.exit()?)
}
