! pi_master.f90 - estimates pi: counts random points of the unit square that lie in the quarter of a circle.
!
!   fpi_master [WORKERS [PROGRAM]]
!
! The master spawns workers and hands out the work in pieces. A worker gets its next piece when it has sent a result.
! When a worker ends too early, its piece goes to another one. The points of a piece depend on the number of the piece
! only, so the result is the same whoever computes it.
program pi_master
  use, intrinsic :: iso_fortran_env, only: error_unit, int64
  implicit none
  include 'fpvm3.h'
  ! To a worker: the number of a piece, and how many points it has. From a worker: the number of the piece, and how many
  ! points are hits. To a worker: there is no more work. From the daemon: a worker has ended.
  integer, parameter :: tag_work = 1, tag_result = 2, tag_done = 3, tag_ended = 4
  integer, parameter :: workers_max = 64, pieces = 64, points = 1000000, idle = -1
  integer :: tids(workers_max)        ! the workers; 0 for one that has ended
  integer :: piece_of(workers_max)    ! what each of them works on, or idle
  integer :: todo(pieces), todo_count ! pieces that nobody works on
  integer :: wanted, workers, results, lost, me, info, message, bytes, tag, source, i, words(2), ended(1)
  integer(int64) :: hits
  character(len=255) :: program, word

  wanted = 4
  program = 'fpi_worker'
  if (command_argument_count() > 0) then
    call get_command_argument(1, word)
    read (word, *, iostat=info) wanted
    if (info /= 0) wanted = 0
  end if
  if (command_argument_count() > 1) call get_command_argument(2, program)
  if (wanted < 1 .or. wanted > workers_max) then
    write (error_unit, '(a, i0, a)') 'usage: fpi_master [WORKERS [PROGRAM]], with 1 to ', workers_max, ' workers'
    stop 2
  end if

  call pvmfmytid(me)
  call must(me, 'pvmfmytid')
  ! Without some of the workers it takes longer. Without any, the first one's error code says why.
  call pvmfspawn(program, PVMTASKDEFAULT, '*', wanted, tids, workers)
  call must(workers, 'pvmfspawn')
  if (workers == 0) call must(tids(1), 'pvmfspawn of the workers')
  call pvmfnotify(PVMTASKEXIT, tag_ended, workers, tids, info)
  call must(info, 'pvmfnotify')

  piece_of = idle
  todo = [(i, i = 0, pieces - 1)]
  todo_count = pieces
  results = 0
  lost = 0
  hits = 0
  do while (results < pieces .and. lost < workers)
    call hand_out()
    call pvmfrecv(-1, -1, message)
    call must(message, 'pvmfrecv')
    call pvmfbufinfo(message, bytes, tag, source, info)
    call must(info, 'pvmfbufinfo')
    if (tag == tag_result) then
      call pvmfunpack(INTEGER4, words, 2, 1, info)
    else
      call pvmfunpack(INTEGER4, ended, 1, 1, info)
      source = ended(1)
    end if
    call must(info, 'pvmfunpack')
    i = findloc(tids(1:workers), source, dim=1)
    if (i == 0) cycle
    if (tag == tag_result) then
      hits = hits + words(2)
      results = results + 1
    else
      ! This comes after the last result of that worker, so no piece counts twice.
      if (piece_of(i) /= idle) then
        todo_count = todo_count + 1
        todo(todo_count) = piece_of(i)
      end if
      tids(i) = 0
      lost = lost + 1
    end if
    piece_of(i) = idle
  end do
  if (results < pieces) then
    write (error_unit, '(a, i0, a)') 'fpi_master: all workers have ended, ', pieces - results, ' results are missing'
    call pvmfexit(info)
    stop 1
  end if

  call pvmfinitsend(PVMDATADEFAULT, message)
  do i = 1, workers
    if (tids(i) /= 0) call pvmfsend(tids(i), tag_done, info)
    call must(info, 'pvmfsend')
  end do
  print '(a, f8.6, 4(a, i0), a)', 'pi is about ', 4d0 * hits / pieces / points, ': ', hits, ' of ', &
    int(pieces, int64) * points, ' points, ', lost, ' of ', workers, ' workers lost'
  call pvmfexit(info)
  call must(info, 'pvmfexit')

contains

  ! Ends the program if the answer of a call is an error.
  subroutine must(answer, name)
    integer, intent(in) :: answer
    character(len=*), intent(in) :: name
    if (answer >= 0) return
    write (error_unit, '(3a, i0)') 'fpi_master: ', name, ': error ', answer
    call pvmfexit(info)
    stop 1
  end subroutine must

  ! Gives a piece to each worker that lives and has none, as long as there are pieces.
  subroutine hand_out()
    do i = 1, workers
      if (tids(i) == 0 .or. piece_of(i) /= idle .or. todo_count == 0) cycle
      piece_of(i) = todo(todo_count)
      todo_count = todo_count - 1
      words = [piece_of(i), points]
      call pvmfinitsend(PVMDATADEFAULT, message)
      call must(message, 'pvmfinitsend')
      call pvmfpack(INTEGER4, words, 2, 1, info)
      call must(info, 'pvmfpack')
      call pvmfsend(tids(i), tag_work, info)
      call must(info, 'pvmfsend')
    end do
  end subroutine hand_out
end program pi_master
