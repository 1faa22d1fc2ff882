//! An owner agent for tests: it directs the guests of its host on behalf of the owner, as a load
//! watcher does.
//!
//! Each line of standard input is a directive: `stop WHY`, `kill MS WHY` or `welcome WHY`. The
//! program sends the directive to the daemon and prints `done MICROS`. MICROS is the time just
//! before the directive was sent, in microseconds since 1970.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use libpvm::Vm;
use sempa_proto::Micros;
use sempa_proto::load::GuestLimits;
use sempa_proto::owner::{EvictionMode, GuestAccess, GuestDirective};
use std::time::{SystemTime, UNIX_EPOCH};

fn time_since_1970() -> Micros {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    Micros(u64::try_from(elapsed.as_micros()).expect("before the year 500000"))
}

fn parse_directive(line: &str) -> Option<GuestDirective> {
    let (command, rest) = line.split_once(' ')?;
    let stop_access = |evict_at, eviction, reason: &str| {
        (
            GuestAccess::Paused { evict_at, eviction },
            reason.to_string(),
        )
    };
    let (access, reason) = match command {
        "stop" => stop_access(None, EvictionMode::Move, rest),
        "kill" => {
            let (delay_ms, reason) = rest.split_once(' ')?;
            stop_access(
                Some(time_since_1970() + Micros::from_millis(delay_ms.parse().ok()?)),
                EvictionMode::Kill,
                reason,
            )
        }
        "welcome" => (GuestAccess::Welcome, rest.to_string()),
        _ => return None,
    };
    Some(GuestDirective {
        access,
        reason,
        limits: GuestLimits::default(),
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::enroll()?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let directive = parse_directive(&line).ok_or(format!("this is no word: {line}"))?;
        let sent_at = time_since_1970();
        vm.set_guest_directive(directive)?;
        println!("done {}", sent_at.0);
    }
    Ok(vm.exit()?)
}
