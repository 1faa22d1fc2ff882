//! Members of broker sessions that `cargo xtask bench broker` measures: `broker-load MODE ...`
//! prints
//! one JSON object of figures. SESSION is a session's name, or the path of a session file.
//!
//! | mode | measures |
//! | --- | --- |
//! | `echo SESSION COUNT` | nothing: runs COUNT processes that answer; prints when the last one ended |
//! | `stream SESSION BYTES MESSAGES` | messages per second to one member |
//! | `single SESSION BYTES MESSAGES` | the time of a send and of a message with its answer |
//! | `farm SESSION MEMBERS BYTES MESSAGES` | messages per second between a foreman and its members |
//! | `iprobe SESSION CALLS` | the time of a call of `iprobe` |
//! | `joins SESSION COUNT` | joins per second |
//! | `many PREFIX COUNT ROUNDS` | COUNT sessions, each with a foreman and a worker of this process |

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use sempa_broker_client::{
    Destination, Error, JoinOptions, Mail, Member, Pattern, Role, SendOptions, Ticket, Verdict,
};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::Read;
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The types of messages between the foreman and its members.
const READY: i32 = 1;
const ECHO: i32 = 2;
const SINK: i32 = 3;

/// Number of messages that wait for the broker's verdict at the same time.
const VERDICTS_MAX: usize = 128;
/// Number of messages that wait for the answer of one member.
const ECHOES_PER_MEMBER: usize = 2;
/// Time that a message waits for room.
const ROOM_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of threads that join at the same time.
const JOINING_THREADS: usize = 4;
/// Number of messages that wait, without a match, while `iprobe` is called.
const STORED_MESSAGES: usize = 50;
/// Time limit of a join; the brokers of many sessions start one after another.
const JOIN_TIMEOUT: Duration = Duration::from_secs(300);

fn options(session: &str, role: Role) -> JoinOptions {
    let mut options = match session.contains('/') {
        true => JoinOptions::outside(session, role),
        false => JoinOptions::new(session, role),
    };
    options.timeout = JOIN_TIMEOUT;
    options
}

fn join(session: &str, role: Role) -> Result<Member> {
    Ok(Member::join(options(session, role))?)
}

/// Sends without waiting for each verdict.
struct Pipeline<'a> {
    member: &'a Member,
    open: VecDeque<(Ticket, Destination, i32, Bytes)>,
}

impl<'a> Pipeline<'a> {
    fn new(member: &'a Member) -> Self {
        Self {
            member,
            open: VecDeque::new(),
        }
    }

    fn send(&mut self, to: Destination, kind: i32, body: Bytes) -> Result<()> {
        while self.open.len() >= VERDICTS_MAX {
            self.settle_oldest()?;
        }
        let ticket = self.member.post(to, kind, body.clone(), false)?;
        self.open.push_back((ticket, to, kind, body));
        Ok(())
    }

    fn settle_oldest(&mut self) -> Result<()> {
        let Some((ticket, to, kind, body)) = self.open.pop_front() else {
            return Ok(());
        };
        let verdict = match self.member.verdict(ticket)? {
            Verdict::Full(_) => {
                let options = SendOptions::default().waiting(ROOM_TIMEOUT);
                self.member.send(to, kind, body, options)?
            }
            verdict => verdict,
        };
        ensure!(
            verdict == Verdict::Taken,
            "a message was answered with {verdict}"
        );
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        while !self.open.is_empty() {
            self.settle_oldest()?;
        }
        Ok(())
    }
}

/// Answers each message until the session is over.
fn answer(member: &Member) -> Result<()> {
    let ready = SendOptions::default().waiting(ROOM_TIMEOUT);
    member.send(Destination::Foreman, READY, Bytes::new(), ready)?;
    let mut pipeline = Pipeline::new(member);
    loop {
        match member.recv(Pattern::any()) {
            Ok(Mail::Message { from, kind, body }) if kind == ECHO => {
                pipeline.send(from.into(), ECHO, body)?;
            }
            Ok(_) => {}
            Err(Error::Over { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_over(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<Error>(), Some(Error::Over { .. }))
}

fn microseconds_since_1970() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(0))
}

fn run_answering_processes(session: &str, count: usize) -> Result<Value> {
    let start = || {
        let mut command = Command::new(std::env::current_exe()?);
        Ok(command.args(["answer", session]).spawn()?)
    };
    let mut children = (0..count)
        .map(|_| start())
        .collect::<Result<Vec<Child>>>()?;
    for child in &mut children {
        let status = child.wait()?;
        ensure!(status.success(), "a member failed: {status}");
    }
    Ok(json!({ "ended_at_us": microseconds_since_1970() }))
}

/// Waits for the first messages of `count` members.
fn wait_for_members(foreman: &Member, count: usize) -> Result<Vec<Destination>> {
    let mut members = Vec::new();
    while members.len() < count {
        if let Mail::Message { from, .. } = foreman.recv(Pattern::any().kind(READY))? {
            members.push(from.into());
        }
    }
    Ok(members)
}

fn per_second(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}

fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort();
    let middle = times.get(times.len() / 2).copied().unwrap_or_default();
    middle.as_secs_f64() * 1e6
}

fn stream(session: &str, bytes: usize, messages: usize) -> Result<Value> {
    let foreman = join(session, Role::Foreman)?;
    let worker = wait_for_members(&foreman, 1)?[0];
    let body = Bytes::from(vec![7; bytes]);
    let started_at = Instant::now();
    let mut pipeline = Pipeline::new(&foreman);
    for _ in 1..messages {
        pipeline.send(worker, SINK, body.clone())?;
    }
    // The answer to the last message comes after the worker has received all others.
    pipeline.send(worker, ECHO, body)?;
    pipeline.settle()?;
    foreman.recv(Pattern::any().kind(ECHO))?;
    let rate = per_second(messages, started_at.elapsed());
    foreman.finish(Duration::ZERO)?;
    Ok(json!({ "messages_per_second": rate }))
}

fn single(session: &str, bytes: usize, messages: usize) -> Result<Value> {
    let foreman = join(session, Role::Foreman)?;
    let worker = wait_for_members(&foreman, 1)?[0];
    let body = Bytes::from(vec![7; bytes]);
    let send = |kind| -> Result<Duration> {
        let started_at = Instant::now();
        let verdict = foreman.send(worker, kind, body.clone(), SendOptions::default())?;
        ensure!(
            verdict == Verdict::Taken,
            "a message was answered with {verdict}"
        );
        if kind == ECHO {
            foreman.recv(Pattern::any().kind(ECHO))?;
        }
        Ok(started_at.elapsed())
    };
    let sends = (0..messages)
        .map(|_| send(SINK))
        .collect::<Result<Vec<_>>>()?;
    let answers = (0..messages)
        .map(|_| send(ECHO))
        .collect::<Result<Vec<_>>>()?;
    foreman.finish(Duration::ZERO)?;
    Ok(json!({ "send_us": median_us(sends), "answer_us": median_us(answers) }))
}

fn farm(session: &str, members: usize, bytes: usize, messages: usize) -> Result<Value> {
    let foreman = join(session, Role::Foreman)?;
    let workers = wait_for_members(&foreman, members)?;
    let body = Bytes::from(vec![7; bytes]);
    let mut pipeline = Pipeline::new(&foreman);
    let started_at = Instant::now();
    let mut sent = 0;
    for worker in workers.iter().cycle().take(members * ECHOES_PER_MEMBER) {
        pipeline.send(*worker, ECHO, body.clone())?;
        sent += 1;
    }
    for _ in 0..messages {
        let Mail::Message { from, .. } = foreman.recv(Pattern::any().kind(ECHO))? else {
            bail!("a notice, which nobody asked for");
        };
        if sent < messages {
            pipeline.send(from.into(), ECHO, body.clone())?;
            sent += 1;
        }
    }
    let time = started_at.elapsed();
    pipeline.settle()?;
    println!(
        "{}",
        json!({ "messages_per_second": per_second(2 * messages, time) })
    );
    // The measuring process looks at the broker, and then closes the input.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let finished_at = microseconds_since_1970();
    foreman.finish(Duration::ZERO)?;
    Ok(json!({ "finished_at_us": finished_at }))
}

fn iprobe(session: &str, calls: u32) -> Result<Value> {
    let member = join(session, Role::Foreman)?;
    let pattern = Pattern::any().kind(ECHO);
    let nanoseconds_per_call = || -> Result<f64> {
        let started_at = Instant::now();
        for _ in 0..calls {
            ensure!(
                member.iprobe(pattern)?.is_none(),
                "a message that nobody has sent"
            );
        }
        Ok(started_at.elapsed().as_secs_f64() * 1e9 / f64::from(calls))
    };
    let empty = nanoseconds_per_call()?;
    for _ in 0..STORED_MESSAGES {
        member.send(
            member.id().into(),
            SINK,
            Bytes::new(),
            SendOptions::default(),
        )?;
    }
    member.probe(Pattern::any().kind(SINK))?;
    let stored = nanoseconds_per_call()?;
    member.finish(Duration::ZERO)?;
    Ok(json!({ "empty_ns": empty, "stored_ns": stored }))
}

fn joins(session: &str, count: usize) -> Result<Value> {
    let first = join(session, Role::Worker)?;
    let join_one = || -> Result<Member> {
        match first.vm() {
            Some(vm) => Ok(Member::join_as_task(
                vm.clone(),
                options(session, Role::Worker),
            )?),
            None => join(session, Role::Worker),
        }
    };
    let started_at = Instant::now();
    let members = std::thread::scope(|scope| {
        let join_share = || (0..count / JOINING_THREADS).map(|_| join_one()).collect();
        let threads: Vec<_> = (0..JOINING_THREADS)
            .map(|_| scope.spawn(join_share))
            .collect();
        let shares = threads.into_iter().map(|thread| {
            let share: Result<Vec<Member>> = thread.join().ok().context("a thread panicked")?;
            share
        });
        shares.collect::<Result<Vec<_>>>()
    })?;
    let joined = members.iter().map(Vec::len).sum::<usize>();
    let rate = per_second(joined, started_at.elapsed());
    println!("{}", json!({ "joins_per_second": rate }));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // The members end with the session.
    std::process::exit(0);
}

/// A session with its foreman and its worker.
struct Pair {
    foreman: Member,
    worker: Member,
}

impl Pair {
    fn start(vm: &libpvm::Vm, session: &str) -> Result<Self> {
        let join = |role| Member::join_as_task(vm.clone(), options(session, role));
        Ok(Self {
            foreman: join(Role::Foreman)?,
            worker: join(Role::Worker)?,
        })
    }

    /// Sends a message to the worker and back.
    fn exchange(&self) -> Result<()> {
        let body = Bytes::from_static(b"12345678");
        let options = SendOptions::default();
        self.foreman
            .send(self.worker.id().into(), ECHO, body.clone(), options)?;
        self.worker.recv(Pattern::any().kind(ECHO))?;
        self.worker
            .send(Destination::Foreman, ECHO, body, options)?;
        self.foreman.recv(Pattern::any().kind(ECHO))?;
        Ok(())
    }
}

fn many(prefix: &str, count: usize, rounds: usize) -> Result<Value> {
    let vm = libpvm::Vm::enroll()?;
    let started_at = Instant::now();
    let pairs = (0..count)
        .map(|number| Pair::start(&vm, &format!("{prefix}{number}")))
        .collect::<Result<Vec<_>>>()?;
    let start_rate = per_second(count, started_at.elapsed());
    println!("{}", json!({ "sessions_per_second": start_rate }));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let started_at = Instant::now();
    for _ in 0..rounds {
        for pair in &pairs {
            pair.exchange()?;
        }
    }
    let rate = per_second(2 * rounds * count, started_at.elapsed());
    println!("{}", json!({ "messages_per_second": rate }));
    std::io::stdin().read_line(&mut line)?;
    for pair in &pairs {
        pair.foreman.finish(Duration::ZERO)?;
    }
    Ok(json!({ "finished_at_us": microseconds_since_1970() }))
}

fn run(words: &[&str]) -> Result<Value> {
    Ok(match words {
        ["answer", session] => {
            let result = join(session, Role::Worker).and_then(|member| answer(&member));
            match result {
                Err(error) if !is_over(&error) => return Err(error),
                _ => json!({}),
            }
        }
        ["echo", session, count] => run_answering_processes(session, count.parse()?)?,
        ["stream", session, bytes, messages] => stream(session, bytes.parse()?, messages.parse()?)?,
        ["single", session, bytes, messages] => single(session, bytes.parse()?, messages.parse()?)?,
        ["farm", session, members, bytes, messages] => {
            farm(session, members.parse()?, bytes.parse()?, messages.parse()?)?
        }
        ["iprobe", session, calls] => iprobe(session, calls.parse()?)?,
        ["joins", session, count] => joins(session, count.parse()?)?,
        ["many", prefix, count, rounds] => many(prefix, count.parse()?, rounds.parse()?)?,
        _ => bail!("unknown arguments {words:?}"),
    })
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let figures = run(&words)?;
    if words.first() != Some(&"answer") {
        println!("{figures}");
    }
    Ok(())
}
