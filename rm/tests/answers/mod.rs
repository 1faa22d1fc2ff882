//! What the resource manager answers when it is asked, also after it has begun again.

use crate::common::{Bed, client, h, request, spawned, t, world};
use crate::{ask, with_books};
use bytes::Bytes;
use pvm_rm::decide::Limits;
use pvm_rm::policy::Conduct;
use pvm_rm::service::Options;
use pvm_rm::spawns::Rules;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{self, Answer, CTX_RM, Decided, End, Excluded, Question, TAG_ASK};
use sempa_proto::{Micros, PvmError, Tid};

/// The client joins and spawns two workers, which are acknowledged and in the log.
pub(crate) fn two_workers(bed: &mut Bed) -> Vec<Tid> {
    bed.world().event(h(1), EventKind::TaskStarted { tid: client(), parent: Tid::NONE, name: String::new(), user: 0 });
    bed.world().spawn(5, &request(2));
    bed.settle();
    let execs = bed.world().took_execs();
    let mut tids = Vec::new();
    for exec in execs {
        let started = bed.world().ack(&exec);
        for tid in started {
            let kind = EventKind::TaskStarted { tid, parent: client(), name: "worker".into(), user: 0 };
            bed.world().event(exec.host, kind);
            bed.world().tasks.push(spawned(tid, exec.host.index()));
            tids.push(tid);
        }
    }
    bed.settle();
    tids
}

#[test]
fn who_asks_why_is_told_where_a_task_was_placed_and_what_was_left_out() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    bed.owner_comes(3);
    bed.world().event(h(3), EventKind::OwnerPresent { host: h(3), since: Micros(1), seen: Micros(2), why: "x".into() });
    let tids = two_workers(&mut bed);
    let Answer::Why { task: Some(task), decisions } = ask(&mut bed, &Question::WhyTask(tids[1])) else { panic!() };
    assert_eq!((task.job, task.counted, task.host.as_str()), (client(), true, "h2"));
    let Decided::Spawn { started, attempts, error: None, .. } = &decisions[0].what else { panic!("{decisions:?}") };
    assert_eq!(started[..], [(tids[0], "h1".to_string()), (tids[1], "h2".to_string())]);
    let left_out: Vec<_> = attempts[0].not_used.iter().map(|n| (n.host.as_str(), n.why.clone())).collect();
    assert_eq!(left_out, [("h3", Excluded::Owner { why: "alice on pts/0".into() })]);
    let Answer::Why { decisions, .. } = ask(&mut bed, &Question::WhyHost("h3".into())) else { panic!() };
    let kinds: Vec<bool> = decisions.iter().map(|d| matches!(d.what, Decided::OwnerCame { .. })).collect();
    assert_eq!(kinds, [true, false], "its owner came, then it was left out: {decisions:?}");
    assert_eq!(ask(&mut bed, &Question::WhyTask(t(1, 999))), Answer::Unknown);
}

#[test]
fn a_question_of_another_version_is_answered_with_the_own_one() {
    let vm = world(1);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world().post(client(), CTX_RM, TAG_ASK, 1, Bytes::from_static(&[0xff, 0xff, 1, 2, 3]));
    bed.settle();
    let body = bed.world().answers[0].3.clone();
    assert_eq!(rm::unpack(&body), Ok(Some(Answer::Version(rm::RM_VERSION))));
}

#[test]
fn one_that_begins_again_goes_on_with_usage_limits_jobs_and_what_it_missed() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let limits = Limits { user_tasks: Some(3), job_tasks: None };
    let conduct = Conduct { rules: Rules { wait: Micros(0), limits }, ..Conduct::default() };
    let options = Options { conduct, ..with_books(dir.path()) };
    let mut bed = Bed::with(&vm, options.clone()).expect("no other");
    let tids = two_workers(&mut bed);
    bed.pass(Micros::from_secs(1));
    // Killed: nothing is written any more. Meanwhile a worker ends.
    drop(bed);
    let used = Usage { user: Micros::from_secs(7), ..Usage::default() };
    vm.0.borrow_mut().event(h(1), EventKind::TaskEnded { tid: tids[0], status: 0x300, used });
    vm.0.borrow_mut().tasks.retain(|task| task.tid != tids[0]);
    vm.0.borrow_mut().forget_mail();
    let mut bed = Bed::with(&vm, options).expect("no other");
    let Answer::Job { job, tasks } = ask(&mut bed, &Question::Job(tids[1])) else { panic!("no job") };
    assert_eq!((job.job, job.sums.tasks, job.sums.running, job.sums.used), (client(), 3, 2, used));
    assert_eq!(tasks[1].ended.map(|(_, how)| how), Some(End::Status(0x300)));
    let Answer::Why { decisions, .. } = ask(&mut bed, &Question::WhyTask(tids[1])) else { panic!("forgotten") };
    assert!(matches!(decisions[0].what, Decided::Spawn { .. }), "{decisions:?}");
    // One of the user's tasks still counts.
    bed.world().spawn(8, &request(3));
    bed.settle();
    assert_eq!(bed.world().answer(8), Some(Ok(vec![Err(PvmError::OutOfRes); 3])));
    bed.world().spawn(9, &request(2));
    bed.settle();
    assert_eq!(bed.world().took_execs().iter().map(|e| e.request.count).sum::<u32>(), 2);
}
