! Every kind of argument that goes between Fortran and the library: strings both ways, lists one by one, all types.
      program calls
      implicit none
      include 'fpvm3.h'
      integer tid, info, mid, other, bytes, tag, src, i, n, kinds, host, speed, parent, flag, one, two
      integer indices(8), owners(8), flags(8), values(3), back(3), pids(2)
      integer*2 small(2), small2(2)
      real singl(2), singl2(2)
      double precision doubl(2), doubl2(2)
      complex z(2), z2(2)
      character*20 name
      character*8 arch, word
      character*300 long
      external pvmsum

      call pvmfmytid(tid)
      call check('mytid', tid .gt. 0)
      call pvmfparent(info)
      call check('parent', info .eq. PvmNoParent)
      call pvmfsetopt(PVMAUTOERR, 0, info)
      call check('setopt', info .eq. 1)

      n = -1
      call pvmfconfig(n, kinds, host, name, arch, speed, info)
      call check('config', info .eq. 0 .and. n .eq. 1 .and. kinds .eq. 1)
      call check('host', host .gt. 0 .and. speed .eq. 1000)
      call check('arch', arch .eq. 'LINUX64')
      call check('name', name(20:20) .eq. ' ' .and. name(1:1) .ne. ' ')
      call pvmfmstat(name, info)
      call check('mstat', info .eq. 0)
      call pvmfmstat('nowhere   ', info)
      call check('mstat of an unknown host', info .eq. PvmNoHost)
      call pvmfarchcode('LINUX64', info)
      call check('archcode', info .gt. 0)
      call pvmftidtohost(tid, info)
      call check('tidtohost', info .eq. host)
      call pvmfhostsync(host, one, two, bytes, tag, info)
      call check('hostsync', info .eq. 0 .and. one .gt. 0)

      n = -1
      call pvmftasks(tid, n, other, parent, host, flag, name, info)
      call check('tasks', info .eq. 0 .and. n .eq. 1 .and. other .eq. tid)

      long = 'x'
      long(300:300) = 'y'
      call pvmfjoingroup(long, info)
      call check('a name over 256 characters', info .eq. PvmBadParam)

      values(1) = 7
      values(2) = -8
      values(3) = 9
      small(1) = 3
      small(2) = -4
      singl(1) = 1.5
      singl(2) = -2.5
      doubl(1) = 0.1d0
      doubl(2) = -1d200
      z(1) = (1.0, 2.0)
      z(2) = (-3.0, 4.0)
      word = 'fortran'
      call pvmfinitsend(PVMDATADEFAULT, mid)
      call check('initsend', mid .gt. 0)
      call pvmfpack(INTEGER4, values, 3, 1, info)
      call check('pack', info .eq. 0)
      call pvmfpack(INTEGER2, small, 2, 1, info)
      call pvmfpack(REAL4, singl, 2, 1, info)
      call pvmfpack(REAL8, doubl, 2, 1, info)
      call pvmfpack(COMPLEX8, z, 2, 1, info)
      call pvmfpack(STRING, word, 8, 1, info)
      call check('pack of a string', info .eq. 0)
      call pvmfpack(99, word, 8, 1, info)
      call check('pack of an unknown type', info .eq. PvmBadParam)
      call pvmfsend(tid, 12, info)
      call check('send', info .eq. 0)
      call pvmftrecv(tid, 12, 30, 0, mid)
      call check('trecv', mid .gt. 0)
      call pvmfbufinfo(mid, bytes, tag, src, info)
      call check('bufinfo', info .eq. 0 .and. tag .eq. 12 .and. src .eq. tid .and. bytes .gt. 0)
      call pvmfunpack(INTEGER4, back, 3, 1, info)
      call pvmfunpack(INTEGER2, small2, 2, 1, info)
      call pvmfunpack(REAL4, singl2, 2, 1, info)
      call pvmfunpack(REAL8, doubl2, 2, 1, info)
      call pvmfunpack(COMPLEX8, z2, 2, 1, info)
      word = ' '
      call pvmfunpack(STRING, word, 8, 1, info)
      call check('unpack', info .eq. 0 .and. word .eq. 'fortran')
      call check('integers', all(back .eq. values) .and. all(small2 .eq. small))
      call check('reals', all(singl2 .eq. singl) .and. all(doubl2 .eq. doubl) .and. all(z2 .eq. z))
      call pvmfnrecv(-1, 12, mid)
      call check('nrecv', mid .eq. 0)

      call pvmfpsend(tid, 13, values, 3, INTEGER4, info)
      call check('psend', info .eq. 0)
      call pvmfprecv(-1, 13, back, 3, INTEGER4, src, tag, bytes, info)
      call check('precv', info .eq. 0 .and. bytes .eq. 12 .and. back(2) .eq. -8)

      call pvmfinitsend(PVMDATADEFAULT, mid)
      call pvmfpack(INTEGER4, values, 1, 1, info)
      call pvmfputinfo('fortran box', mid, PVMMBOXDEFAULT, info)
      call check('putinfo', info .eq. 0)
      n = -1
      call pvmfgetmboxinfo('fortran', name, n, i, indices, owners, flags, info)
      call check('getmboxinfo', info .eq. 0 .and. n .eq. 1 .and. i .eq. 1 .and. owners(1) .eq. tid)
      call check('name of a class', name .eq. 'fortran box')
      call pvmfrecvinfo('fortran box', 0, PVMMBOXDEFAULT, mid)
      call check('recvinfo', mid .gt. 0)
      call pvmfdelinfo('fortran box', 0, 0, info)
      call check('delinfo', info .eq. 0)

      call pvmfjoingroup('fortran group  ', info)
      call check('joingroup', info .eq. 0)
      call pvmfgsize('fortran group', info)
      call check('gsize', info .eq. 1)
      call pvmfgetinst('fortran group', tid, info)
      call check('getinst', info .eq. 0)
      call pvmfgettid('fortran group', 0, info)
      call check('gettid', info .eq. tid)
      call pvmfbarrier('fortran group', 1, info)
      call check('barrier', info .eq. 0)
      call pvmfreduce(pvmsum, values, 3, INTEGER4, 14, 'fortran group', 0, info)
      call check('reduce', info .eq. 0 .and. values(2) .eq. -8)
      call pvmfgather(back, values, 3, INTEGER4, 15, 'fortran group', 0, info)
      call check('gather', info .eq. 0 .and. back(3) .eq. 9)
      call pvmflvgroup('fortran group', info)
      call check('lvgroup', info .eq. 0)
      call pvmfgsize('fortran group', info)
      call check('gsize of no group', info .eq. PvmNoGroup)

      call pvmfspawn('no such program', PVMTASKDEFAULT, '*', 2, pids, info)
      call check('spawn of nothing', info .eq. 0 .and. pids(1) .eq. PvmNoFile)
      call pvmfsiblings(n, 0, other)
      call check('siblings', n .eq. 1 .and. other .eq. tid)
      call pvmfsiblings(n, 1, other)
      call check('siblings behind the end', other .eq. PvmNoTask)
      call pvmfnewcontext(one)
      call pvmfsetcontext(one, two)
      call check('contexts', one .gt. 0 .and. two .eq. 0)
      call pvmfgetcontext(i)
      call check('getcontext', i .eq. one)
      call pvmfsetcontext(two, i)
      call pvmffreecontext(one, info)
      call check('freecontext', info .eq. 0)
      call pvmffreecontext(one, info)
      call check('freecontext again', info .eq. PvmNotFound)
      call pvmfexit(info)
      call check('exit', info .eq. 0)
      print *, 'all calls are right'
      end

      subroutine check(what, good)
      character*(*) what
      logical good
      if (.not. good) then
        print *, 'wrong: ', what
        stop 1
      end if
      end
