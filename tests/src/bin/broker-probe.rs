//! A member of a session for tests: `broker-probe MODE SESSION ...` prints what the broker answers,
//! one fact per line. SESSION is a session's name, or the path of a session file.
//!
//! | mode | what the program does |
//! | --- | --- |
//! | `join ROLE SECONDS` | joins within SECONDS, and stays until standard input ends |
//! | `rights` | does as a worker what only a foreman may do, and joins as a foreman |
//! | `remember COUNT` | stores the entries of COUNT sessions SESSION0, SESSION1, ... that ended long ago |
//! | `fill BYTES` | sends messages of BYTES to a member that does not receive, until one is refused |
//!
//! Exit status: 0, 79 if the session is over, or 1.

use libpvm::Vm;
use sempa_broker_client::directory::{SessionEntry, publish};
use sempa_broker_client::{
    EXIT_OVER, Error, JoinOptions, Mail, Member, Pattern, Role, SendOptions, SessionEnd, Verdict,
};
use std::io::Read;
use std::process::ExitCode;
use std::time::Duration;

/// Largest number of messages of `fill`.
const MESSAGES_MAX: usize = 1000;
/// Speed that a member reports, in thousandths of a reference machine.
const FACTOR: u32 = 1500;
/// Time that a send waits for room.
const ROOM_TIMEOUT: Duration = Duration::from_secs(60);

fn options(session: &str, role: Role) -> JoinOptions {
    let mut options = match session.contains('/') {
        true => JoinOptions::outside(session, role),
        false => JoinOptions::new(session, role),
    };
    options.factor = FACTOR;
    options
}

fn join(session: &str, role: &str, seconds: &str) -> Result<(), Box<dyn std::error::Error>> {
    let role = match role {
        "foreman" => Role::Foreman,
        _ => Role::Worker,
    };
    let mut options = options(session, role);
    options.timeout = Duration::from_secs(seconds.parse()?);
    let member = Member::join(options)?;
    println!("joined as {}", member.id());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(member.leave()?)
}

fn check_rights(session: &str) -> Result<(), Box<dyn std::error::Error>> {
    let worker = Member::join(options(session, Role::Worker))?;
    println!("finish: {}", worker.finish(Duration::ZERO)?);
    if let Err(error) = worker.report() {
        println!("report: {error}");
    }
    if let Err(error) = Member::join(options(session, Role::Foreman)) {
        println!("foreman: {error}");
    }
    Ok(worker.leave()?)
}

fn remember(prefix: &str, count: &str) -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::enroll()?;
    for ended_at in 0..count.parse()? {
        let entry = SessionEntry::Over {
            end: SessionEnd::Finished,
            ended_at,
            fingerprint: String::new(),
        };
        publish(&vm, &format!("{prefix}{ended_at}"), &entry)?;
    }
    Ok(vm.exit()?)
}

fn fill(session: &str, bytes: &str) -> Result<(), Box<dyn std::error::Error>> {
    let body = vec![7; bytes.parse()?];
    let sender = Member::join(options(session, Role::Foreman))?;
    let vm = sender.vm().ok_or("a task")?.clone();
    let receiver = Member::join_as_task(vm, options(session, Role::Worker))?;
    let send = |options| sender.send(receiver.id().into(), 1, body.clone(), options);
    let mut sent = 0;
    let refusal = loop {
        match send(SendOptions::default())? {
            Verdict::Taken if sent < MESSAGES_MAX => sent += 1,
            verdict => break verdict,
        }
    };
    println!("after {sent}: {refusal}");
    if sent == 0 {
        return Ok(());
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| send(SendOptions::default().waiting(ROOM_TIMEOUT)));
        for _ in 0..=sent {
            let mail = receiver.recv(Pattern::any())?;
            assert!(matches!(mail, Mail::Message { body: received, .. } if received == body));
        }
        let verdict = waiting.join().map_err(|_| "the sender panicked")??;
        println!("with room: {verdict}");
        Ok::<(), Box<dyn std::error::Error>>(())
    })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["join", session, role, seconds] => join(session, role, seconds),
        ["rights", session] => check_rights(session),
        ["remember", prefix, count] => remember(prefix, count),
        ["fill", session, bytes] => fill(session, bytes),
        _ => Err("usage: broker-probe join|rights|remember|fill SESSION ...".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("broker-probe: {error}");
            match error.downcast_ref::<Error>() {
                Some(Error::Over { .. }) => ExitCode::from(EXIT_OVER),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
