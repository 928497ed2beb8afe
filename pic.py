import numpy as np, matplotlib; matplotlib.use("Agg"); import matplotlib.pyplot as plt, shutil
from medlab.data.volume import Volume
from medlab.data.dicom import read_dicom
from medlab.slices.series import write_series
def head(p):
    x,y,z=np.moveaxis(p,-1,0); r=lambda c,a:((x-c[0])/a[0])**2+((y-c[1])/a[1])**2+((z-c[2])/a[2])**2
    v=np.full(x.shape,-1000.); v[r((0,0,0),(78,95,85))<1]=40; v[r((0,0,0),(74,91,81))<1]=900; v[r((0,0,0),(68,85,75))<1]=35
    v[r((0,10,5),(12,40,15))<1]=8; v[r((25,-30,20),(12,12,12))<1]=70; v[(abs(x)<4)&(abs(y-60)<4)&(abs(z)<60)]=500
    v[(np.hypot(x,y+40)<5)&(abs(z)<55)]=300
    return v
a=np.diag([1.2,1.2,4,1.]); t=np.radians(20); a[:3,2]=(0,4*np.tan(t),4); a[:3,3]=(-96,-115-80*np.tan(t)+0,-80)
k,j,i=np.indices((41,190,160)); p=np.stack([i,j,k],-1)@a[:3,:3].T+a[:3,3]
shutil.rmtree("/tmp/geometry/pic/s",ignore_errors=True); write_series(Volume(head(p).astype(np.float32),a,"head"),"/tmp/geometry/pic/s")
s=read_dicom("/tmp/geometry/pic/s"); u=read_dicom("/tmp/geometry/pic/s",upright=True); print(s,*s.notes,u,*u.notes,sep="\n")
K=np.indices(u.shape); q=np.stack(K[::-1],-1)@u.affine[:3,:3].T+u.affine[:3,3]; h=head(q)
f,ax=plt.subplots(1,4,figsize=(16,4.4),layout="constrained")
for x,(d,n,asp) in zip(ax,((s.data[:,:,80],"as stored: sheared array",s.spacing[0]/s.spacing[1]),(u.data[:,:,80],"read upright",u.spacing[0]/u.spacing[1]),(h[:,:,80],"phantom on that grid",u.spacing[0]/u.spacing[1]),(u.data[20],"axial, upright",1))):
    x.imshow(d,cmap="gray",vmin=-150,vmax=500,origin="lower",aspect=asp); x.set_title(n); x.axis("off")
f.savefig("/tmp/geometry/pic/tilt.png",dpi=60)
seen=u.data>-999.5; e=np.abs(u.data-h); print("median |error| HU", np.median(e[seen]), "share >50 HU (edges)", (e[seen]>50).mean())
